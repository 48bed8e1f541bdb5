"""Decides when to save a checkpoint, and saves and loads it: model, optimizer, data position, counters."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.cluster.fencing import wait_for_lease
from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.training.run_position import RunPosition
from actors.training.step_memory import Restored, StepMemory
from launcher.base.disk_faults import DiskFault, Refusal
from launcher.base.errors import CheckpointError
from launcher.base.messages import StepReport
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.uploads import Uploader, remote_of
from launcher.checkpoints.verification import verify
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schedule import Schedule
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths


class Checkpointer:
    """Saves when `saver` or `recover` is due; keeps the saver's checkpoints and the newest few of the others."""

    def __init__(self, config: RunConfig, paths: RunPaths, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._store = CheckpointStore(paths.default_checkpoints)
        self._catalog = CheckpointCatalog.of_run(config, paths)
        self._fingerprint = config_fingerprint(config)
        now = time.monotonic()
        self._saver = Schedule(config.saver, now=now)
        self._recover = Schedule(config.recover, now=now, first_steps=config.recover.first_steps)
        self._evaluator = Schedule(config.evaluator, now=now)
        self._memory = StepMemory(config, paths, journal)
        self._base = self._newest()
        self._keep_next = False
        remote = remote_of(config)
        self._uploads = (
            None if remote is None else Uploader(remote, self._store, journal, keep_last=config.recover.keep_last)
        )

    def _newest(self) -> Checkpoint | None:
        return next((c for c in reversed(self._store.list()) if c.state is CheckpointState.COMMITTED), None)

    def remember(self, model: PolicyModel, queue: PromptQueue, position: RunPosition, report: StepReport) -> None:
        """Keep the state after the step of `report` in memory: from then on no kill loses the step."""
        self._memory.keep(model, queue, position, report, self._base)

    def forget(self, position: RunPosition) -> None:
        """The trainer ends: remove from memory what is on disk too."""
        if self._uploads is not None:
            self._uploads.close()
        name = position.checkpoint_name
        if name is not None and self._store.find(name.global_step) is not None:
            self._memory.remove()

    def is_due(self, *, ended_epoch: bool) -> bool:
        """Whether a checkpoint is due; call it once after each committed step."""
        now = time.monotonic()
        self._keep_next |= self._saver.step_done(ended_epoch=ended_epoch, now=now)
        return self._recover.step_done(ended_epoch=ended_epoch, now=now) or self._keep_next

    def evaluation_is_due(self, *, ended_epoch: bool) -> bool:
        return self._evaluator.step_done(ended_epoch=ended_epoch, now=time.monotonic())

    def save(self, model: PolicyModel, queue: PromptQueue, position: RunPosition) -> Checkpoint | None:
        """Commit the state after the last step, then prune; None where that step is saved already, or there is none.

        Raises CheckpointError, with the older checkpoints as they were.
        """
        name = position.checkpoint_name
        if name is None or self._store.find(name.global_step) is not None:
            return None
        wait_for_lease()
        started = time.monotonic()
        with self._store.staging(name) as staged:
            model.save(staged)
            state = {"position": position.to_json(), "queue": queue.state_dict()}
            (staged / POSITION_FILE).write_text(json.dumps(state))
            committed = self._store.commit(
                staged,
                global_step=name.global_step,
                policy_version=model.policy_version,
                config_fingerprint=self._fingerprint,
                health={"reward_mean": fmean(position.recent_rewards), "verdict": "HEALTHY"},
                keep=self._keep_next,
            )
        self._keep_next = False
        self._base = committed
        self._journal.record(
            "checkpoint.committed",
            subject=str(name),
            global_step=name.global_step,
            seconds=time.monotonic() - started,
        )
        keep_last = self._config.recover.keep_last
        spare = self._catalog.worth_sparing(keep_last, healthy_until=position.next_step - 1)
        for removed in self._store.prune(keep_last, spare=spare):
            self._journal.record("checkpoint.pruned", subject=str(removed), global_step=removed.global_step)
        if self._uploads is not None:
            self._uploads.committed()
        return committed

    def refusal(self, fault: DiskFault) -> Refusal:
        """That a save met it. It would have taken about as much as the last one; with nothing to go by, 0."""
        newest = None if self._base is None else self._base.manifest
        needed = 0 if newest is None else newest.total_bytes
        return Refusal(path=str(self._store.root), fault=fault, at=time.monotonic(), needed=needed)

    def load(self, folder: Path, model: PolicyModel, queue: PromptQueue) -> RunPosition:
        """Restore model, optimizer, RNG, data position and counters from `folder`.

        Checkpoints of later steps are set aside, as those steps are trained again. Raises CheckpointError.
        """
        model.load(folder)
        path = folder / POSITION_FILE
        try:
            state = json.loads(path.read_text())
            position = RunPosition.from_json(state["position"])
            queue.load_state_dict(state["queue"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} can't be read: {error!r}", "resume from an older checkpoint") from error
        self._continue_from(position, folder.name)
        return position

    def load_step(self, global_step: int, model: PolicyModel, queue: PromptQueue) -> Restored:
        """Restore the state after a step, from memory or else from disk, verified before anything changes."""
        state = self._memory.find(global_step, self._store.list())
        if state is not None:
            try:
                return self._load_state(state, model, queue)
            except CheckpointError as error:
                self._journal.record("state.damaged", subject="trainer", reason=error.message, global_step=global_step)
        checkpoint = self._store.find(global_step)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint of step {global_step} in {self._store.root}")
        found = verify(checkpoint.path)
        if not found.is_complete:
            raise CheckpointError(f"{checkpoint} can't be gone back to: {found.why_not}", "an older one is used")
        return Restored(position=self.load(checkpoint.path, model, queue))

    def _load_state(self, state: InMemoryCheckpoint, model: PolicyModel, queue: PromptQueue) -> Restored:
        restored = self._memory.load(state, model, queue)
        self._continue_from(restored.position, str(state), is_last_step_owed=True)
        return restored

    def begin_anew(self, model: PolicyModel, queue: PromptQueue, first: Mapping[str, Any]) -> RunPosition:
        """Restore the run's first weights and the data position `first`; all checkpoints are set aside."""
        model.begin_anew()
        queue.load_state_dict(first)
        self._continue_from(RunPosition(), "the beginning")
        return RunPosition()

    def _continue_from(self, position: RunPosition, what: str, *, is_last_step_owed: bool = False) -> None:
        """`is_last_step_owed`: what was due after the last step may not have been done, so it counts as due again."""
        done = position.next_step - 1
        for aside in self._store.set_aside_after(done):
            self._journal.record("checkpoint.set_aside", subject=aside.name, reason=f"resumed from {what}")
        self._memory.drop_after(done)
        if self._uploads is not None:
            self._uploads.set_back(done)
        self._base = self._newest()
        steps, epochs = (done, position.last_epoch) if is_last_step_owed else (position.next_step, position.epoch)
        now = time.monotonic()
        for schedule in (self._saver, self._recover, self._evaluator):
            schedule.restored(now=now, steps_done=steps, epochs_done=epochs)
