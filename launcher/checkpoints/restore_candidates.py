"""What a run may go back to, from what lies on the disk and in memory now; and what it must not go back to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint, InMemoryCheckpoints
from launcher.config.schema import RunConfig
from launcher.config.supervision import RestoreConfig
from launcher.policy.restore import CheckpointFacts, CheckpointHealth, certify, choose
from launcher.run_files.run_paths import RunPaths

Damaged = Mapping[int, Set[float]]
"""Of each step, when those were made that could not be loaded: one that is made anew after a restore is another."""


class RestoreCandidates:
    """The checkpoints of a run, and the states in this machine's memory."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self._config = config
        self._store = CheckpointStore(paths.default_checkpoints)
        self._memory = InMemoryCheckpoints(paths)

    def facts(self, damaged: Damaged, *, healthy_until: int) -> tuple[CheckpointFacts, ...]:
        """Of each committed one. `healthy_until`: the last step that was judged healthy; a checkpoint is good so many
        steps before it. Condemned ones are not here.

        A state in memory is there only where the disk does not hold its step. Raises CheckpointError and JournalError
        where the disk can't be read.
        """
        checkpoints = self._store.list()
        on_disk = on_disk_facts(checkpoints, {one.global_step for one in checkpoints if _is_damaged(one, damaged)})
        held = {facts.global_step for facts in on_disk if facts.is_whole}
        in_memory = [
            CheckpointFacts(
                global_step=state.global_step,
                policy_version=state.facts.policy_version,
                health=CheckpointHealth.CANDIDATE,
                is_whole=state.created_at not in damaged.get(state.global_step, ()),
                in_memory=True,
            )
            for state in self._in_memory(checkpoints)
            if state.global_step not in held
        ]
        return certified([*on_disk, *in_memory], healthy_until, self._config.restore)

    def _in_memory(self, checkpoints: Sequence[Checkpoint]) -> Sequence[InMemoryCheckpoint]:
        return self._memory.standing(checkpoints) if self._config.recover.memory else ()

    def made_at(self, global_step: int) -> tuple[float, ...]:
        """When what there is of this step was made, on the disk and in memory. Raises as `facts`."""
        checkpoints = self._store.list()
        on_disk = [one.manifest.created_at for one in checkpoints if one.global_step == global_step and one.manifest]
        in_memory = [one.created_at for one in self._in_memory(checkpoints) if one.global_step == global_step]
        return (*on_disk, *in_memory)

    def condemn_after(self, global_step: int) -> tuple[str, ...]:
        """What came after it holds damage: the names under which the checkpoints are aside. Raises CheckpointError."""
        self._memory.drop_after(global_step)
        return tuple(path.name for path in self._store.condemn_after(global_step))

    def forget_after(self, global_step: int) -> None:
        """States in memory that hold damage, which no later attempt may go on from."""
        self._memory.drop_after(global_step)

    def newest_model(self, damaged: Damaged) -> Checkpoint | None:
        """The checkpoint on the disk that a server may start from."""
        on_disk = [facts for facts in self.facts(damaged, healthy_until=-1) if not facts.in_memory]
        step = choose(on_disk, None, (), self._config.restore).global_step
        return None if step is None else self._store.find(step)


def _is_damaged(checkpoint: Checkpoint, damaged: Damaged) -> bool:
    made_at = None if checkpoint.manifest is None else checkpoint.manifest.created_at
    return made_at in damaged.get(checkpoint.global_step, ())


def on_disk_facts(checkpoints: Sequence[Checkpoint], damaged: Set[int]) -> list[CheckpointFacts]:
    """Of those that are committed, before any is certified. `damaged`: their steps."""
    return [
        CheckpointFacts(
            global_step=checkpoint.global_step,
            policy_version=checkpoint.manifest.policy_version,
            health=CheckpointHealth.CANDIDATE,
            is_whole=checkpoint.global_step not in damaged,
            reward=checkpoint.manifest.reward_mean,
        )
        for checkpoint in checkpoints
        if checkpoint.state is CheckpointState.COMMITTED and checkpoint.manifest is not None
    ]


def certified(
    facts: Sequence[CheckpointFacts], healthy_until: int, settings: RestoreConfig
) -> tuple[CheckpointFacts, ...]:
    """With what the steps after each say of it."""
    return tuple(dataclasses.replace(one, health=certify(one, healthy_until, settings)) for one in facts)
