"""The checkpoints of a run as the choice of a restore needs them, from what lies on the disk now."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from launcher.checkpoints import CheckpointState, CheckpointStore
from launcher.config import RestoreConfig
from launcher.policy.restore import CheckpointFacts, CheckpointHealth, certify


def checkpoint_facts(
    store: CheckpointStore, damaged: Set[int], *, healthy_until: int, settings: RestoreConfig
) -> tuple[CheckpointFacts, ...]:
    """Of each committed one. `damaged`: steps whose checkpoint could not be loaded. `healthy_until`: the last step
    that was judged healthy; a checkpoint is good so many steps before it. Condemned ones are set aside, and not here.
    """
    found = []
    for checkpoint in store.list():
        if checkpoint.state is not CheckpointState.COMMITTED or checkpoint.manifest is None:
            continue
        facts = CheckpointFacts(
            global_step=checkpoint.global_step,
            policy_version=checkpoint.manifest.policy_version,
            health=CheckpointHealth.CANDIDATE,
            is_whole=checkpoint.global_step not in damaged,
        )
        found.append(dataclasses.replace(facts, health=certify(facts, healthy_until, settings)))
    return tuple(found)
