"""Which checkpoints must outlive their age: the best, and the newest that are certified good, to which a collapse goes
back.

The newest few are too young to be trusted when the damage is found; with a checkpoint at every step, retention by age
alone would have deleted every one from before it (P4). One whose files are not in their length protects nothing, so it
is not counted among those that stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.errors import CheckpointError
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointState, check_checkpoint_sizes
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_candidates import certified, on_disk_facts
from launcher.config.schema import RunConfig
from launcher.policy.restore import worth_keeping


def worth_sparing(store: CheckpointStore, config: RunConfig, *, healthy_until: int) -> frozenset[int]:
    """Their steps. `healthy_until`: the last committed step; one that was not judged healthy is not committed."""
    checkpoints = store.list()
    facts = certified(on_disk_facts(checkpoints, _torn(checkpoints)), healthy_until, config.restore)
    return worth_keeping(facts, config.recover.keep_last)


def _torn(checkpoints: Sequence[Checkpoint]) -> frozenset[int]:
    return frozenset(one.global_step for one in checkpoints if one.state is CheckpointState.COMMITTED and _is_torn(one))


def _is_torn(checkpoint: Checkpoint) -> bool:
    try:
        check_checkpoint_sizes(checkpoint.path)
    except CheckpointError:
        return True
    return False
