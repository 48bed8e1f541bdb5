"""Which checkpoints must outlive their age: the newest that are certified good, to which a collapse goes back.

The newest few are too young to be trusted when the damage is found; with a checkpoint at every step, retention by age
alone would have deleted every one from before it (P4).
"""

from __future__ import annotations

from actors.checkpoint_facts import certified, on_disk_facts
from launcher.checkpoints import CheckpointStore
from launcher.config import RunConfig
from launcher.policy.restore import worth_keeping


def worth_sparing(store: CheckpointStore, config: RunConfig, *, healthy_until: int) -> frozenset[int]:
    """Their steps. `healthy_until`: the last committed step; one that was not judged healthy is not committed."""
    facts = certified(on_disk_facts(store.list(), frozenset()), healthy_until, config.restore)
    return worth_keeping(facts, config.recover.keep_last)
