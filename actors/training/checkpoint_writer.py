"""Writes one checkpoint on whatever thread it is called, and prunes the older ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from actors.cluster.fencing import wait_for_lease
from actors.model.policy_model import PolicyModel
from actors.model.training_state import TrainingState
from actors.training.run_position import RunPosition
from launcher.base.messages import Health
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import LEFT_FREE
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.restore_request import restore_is_asked
from launcher.checkpoints.uploads import Uploader
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schema import RunConfig
from launcher.resources.hardware import find_hardware
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What is to be saved, collected when the step was taken. `queue`: its state. `keep`: for good."""

    name: CheckpointName
    model: PolicyModel
    state: TrainingState
    queue: dict[str, Any]
    position: RunPosition
    keep: bool


class CheckpointWriter:
    """`newest`: the newest complete checkpoint, None before the first `look`. One `write` at a time."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, journal: Journal, store: CheckpointStore, uploads: Uploader | None
    ) -> None:
        self._paths = paths
        self._journal = journal
        self._store = store
        self._uploads = uploads
        self._catalog = CheckpointCatalog.of_run(config, paths)
        self._keep_last = config.recover.keep_last
        self._fingerprint = config_fingerprint(config)
        self.newest: Checkpoint | None = None

    def look(self) -> None:
        """Find the newest on the disk."""
        found = (c for c in reversed(self._store.list()) if c.state is CheckpointState.COMMITTED)
        self.newest = next(found, None)

    def write(self, save: Save, has_lines: Callable[[], bool], was_read: Callable[[], None]) -> bool:
        """Commit it, then prune; not where the step, asked as late as possible, hasn't its lines.

        `was_read` is called as soon as the model may step. Raises CheckpointError.
        """
        wait_for_lease()
        started = time.monotonic()
        with self._store.staging(save.name) as staged:
            own = save.model.copy_to_host(save.state, room=(1 - LEFT_FREE) * find_hardware().memory_free)
            if own is not None:
                was_read()
            if not has_lines():
                return False
            save.model.save(staged, own or save.state)
            was_read()
            position = {"position": save.position.to_json(), "queue": save.queue}
            (staged / POSITION_FILE).write_text(json.dumps(position))
            wait_for_lease()
            committed = self._store.commit(
                staged,
                global_step=save.name.global_step,
                policy_version=cast(int, save.state[0]["policy_version"]),
                config_fingerprint=self._fingerprint,
                health={"reward_mean": fmean(save.position.recent_rewards), "verdict": Health.UNKNOWN},  # nobody asked
                keep=save.keep,
            )
        before, self.newest = self.newest, committed
        self._journal.record(
            "checkpoint.committed",
            subject=str(save.name),
            global_step=save.name.global_step,
            seconds=time.monotonic() - started,
        )
        # what is kept in memory of the steps meanwhile counts as long as the one before it is there
        spare = set() if before is None else {before.global_step}
        spare |= self._catalog.worth_sparing(self._keep_last, healthy_until=save.name.global_step)
        # what a person has asked for, and what it would set aside, must be there when the run goes back
        pruned = () if restore_is_asked(self._paths) else self._store.prune(self._keep_last, spare=spare)
        for removed in pruned:
            self._journal.record("checkpoint.pruned", subject=str(removed), global_step=removed.global_step)
        if self._uploads is not None:
            self._uploads.committed()
        return True
