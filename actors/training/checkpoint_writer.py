"""Writes one checkpoint to the disk on whatever thread it is called, and prunes the older ones."""

from __future__ import annotations

import json
import time
from statistics import fmean

from actors.cluster.fencing import wait_for_lease
from actors.model.policy_model import PolicyModel
from actors.training.step_state import StepState
from launcher.base.messages import Health
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.restore_request import restore_is_asked
from launcher.checkpoints.uploads import Uploader
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths


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

    def has(self, state: StepState) -> bool:
        has_folder = (self._store.root / str(state.name)).is_dir()  # else others need not be readable
        return has_folder and self._store.find(state.name.global_step) is not None

    def write(self, model: PolicyModel, state: StepState, *, keep: bool) -> None:
        """Commit it, `keep`: for good; then prune. Raises CheckpointError."""
        wait_for_lease()
        started = time.monotonic()
        with self._store.staging(state.name) as staged:
            model.save(staged, state.training)
            (staged / POSITION_FILE).write_text(json.dumps(state.position_file()))
            wait_for_lease()
            committed = self._store.commit(
                staged,
                global_step=state.name.global_step,
                policy_version=state.policy_version,
                config_fingerprint=self._fingerprint,
                health={"reward_mean": fmean(state.position.recent_rewards), "verdict": Health.UNKNOWN},  # nobody asked
                keep=keep,
            )
        before = self.newest
        self.newest = committed
        self._journal.record(
            "checkpoint.committed",
            subject=str(state.name),
            global_step=state.name.global_step,
            seconds=time.monotonic() - started,
        )
        # what is kept in memory of the steps meanwhile counts as long as the one before it is there
        spare = set() if before is None else {before.global_step}
        spare |= self._catalog.worth_sparing(self._keep_last, healthy_until=state.name.global_step)
        # what a person has asked for, and what it would set aside, must be there when the run goes back
        pruned = () if restore_is_asked(self._paths) else self._store.prune(self._keep_last, spare=spare)
        for removed in pruned:
            self._journal.record("checkpoint.pruned", subject=str(removed), global_step=removed.global_step)
        if self._uploads is not None:
            self._uploads.committed()
