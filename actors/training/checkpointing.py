"""Decides when to save a checkpoint, and saves and loads it: model, optimizer, data position, counters.

A step waits for neither the state in memory nor a checkpoint: threads of their own write them while the next rollouts
are collected.

    step N ─► collect the state ─► rollouts and gradients of N + 1 ─► wait_to_step ─► step N + 1
                   ├─ written to memory, renamed; then the step's lines ──┤
                   └─ copied ─────────────────────────────────────────────┴─ written, hashed, renamed; old ones pruned

Weights and moments stay as they are until the next step, so until then they are read where they are. A checkpoint
outlasts that: it is written from a copy in the host's memory; where there is no room for one, from the model, and the
next step waits for that. Of several ranks the state is gathered first, which is a copy. One checkpoint at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.model.training_state import TrainingState
from actors.training.checkpoint_writer import CheckpointWriter, Save
from actors.training.run_position import RunPosition
from actors.training.step_memory import Restored, StepMemory
from launcher.base.disk_faults import DiskFault, Refusal, fault_of
from launcher.base.durable import refusal_of
from launcher.base.errors import CheckpointError, DiskError
from launcher.base.messages import StepReport
from launcher.checkpoints.checkpoint_folder import refuse_unread
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.uploads import Uploader, remote_of
from launcher.checkpoints.verification import verify
from launcher.config.schedule import Schedule
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

STATE_S, CHECKPOINT_S = "timeperf/state_s", "timeperf/checkpoint_s"
"""How long steps have waited for them."""


class Checkpointer:
    """Saves when `saver` or `recover` is due; keeps the saver's checkpoints and the newest few of the others."""

    def __init__(self, config: RunConfig, paths: RunPaths, journal: Journal) -> None:
        self._journal = journal
        self._store = CheckpointStore(paths.default_checkpoints)
        now = time.monotonic()
        self._saver = Schedule(config.saver, now=now)
        self._recover = Schedule(config.recover, now=now, first_steps=config.recover.first_steps)
        self._evaluator = Schedule(config.evaluator, now=now)
        self._memory = StepMemory(config, paths, journal)
        self._keep_next = False
        self._beside = ThreadPoolExecutor(2, thread_name_prefix="beside")  # the state in memory, and a checkpoint
        self._keeping: Future[None] | None = None
        self._saving: tuple[Save, Future[bool]] | None = None
        self._is_read = threading.Event()
        self._collected: TrainingState | None = None
        self.is_owed = False
        self._stalls = {STATE_S: 0.0, CHECKPOINT_S: 0.0}
        remote = remote_of(config)
        self._uploads = (
            None if remote is None else Uploader(remote, self._store, journal, keep_last=config.recover.keep_last)
        )
        self._writer = CheckpointWriter(config, paths, journal, self._store, self._uploads)

    # ── beside the steps ──

    def remember(
        self,
        model: PolicyModel,
        queue: PromptQueue,
        position: RunPosition,
        report: StepReport,
        record: Callable[[], None],
    ) -> None:
        """Keep the state after the step of `report` in memory: from then on no kill loses the step. Then `record` it.

        Returns before both, and `wait_to_step` after both; where the state isn't kept, `record` comes first.
        """
        if not self._memory.is_due:
            record()
            return
        with self._waiting(STATE_S):
            state = self._collected = model.training_state()
            content, base = queue.state_dict(), self._writer.newest

        def work() -> None:
            with model.beside_the_steps():
                self._memory.keep(state, content, position, report, base)
            record()

        self._keeping = self._beside.submit(work)

    def wait_to_step(self) -> float:
        """Returns, with the seconds that it took, when the weights may change. Raises what `record` raised."""
        began = time.monotonic()
        if self._saving is not None:
            with self._waiting(CHECKPOINT_S):
                self._is_read.wait()
        kept, self._keeping = self._keeping, None
        if kept is not None:
            with self._waiting(STATE_S):
                wait([kept])
            self._memory.cost(self._stalls[STATE_S])
            kept.result()
        self._collected = None
        return time.monotonic() - began

    def stalls(self) -> dict[str, float]:
        """How long the steps have waited for states and checkpoints since the last call."""
        stalls = dict(self._stalls)
        self._stalls = dict.fromkeys(stalls, 0.0)
        return stalls

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._stalls[what] += time.monotonic() - began

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        saving = self._saving  # asked from other threads
        return saving is not None and not saving[1].done()

    def settle(self) -> None:
        """Returns when nothing is being written any more, whatever became of it: the weights may change."""
        kept, saving = self._keeping, self._saving
        if kept is not None:
            wait([kept])
        if saving is not None:
            wait([saving[1]])
        self._keeping = self._collected = None

    def forget(self, position: RunPosition) -> None:
        """The trainer ends: remove from memory what is on disk too."""
        self.settle()
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

    def save(
        self, model: PolicyModel, queue: PromptQueue, position: RunPosition, may_commit: Callable[[], bool]
    ) -> None:
        """Begin to save the state after the last step, when the lines of the step are written and if it `may_commit`;
        `conclude` comes before another one."""
        name = position.checkpoint_name
        if name is None:
            return
        with self._waiting(CHECKPOINT_S):
            state = self._collected or model.training_state()
            keep, self._keep_next = self._keep_next, False
            save = Save(name=name, model=model, state=state, queue=queue.state_dict(), position=position, keep=keep)
            self._is_read.clear()
            self._saving = save, self._beside.submit(self._save, save, self._keeping, may_commit)
            if model.saves_alone:
                self._is_read.wait()

    def _save(self, save: Save, lines: Future[None] | None, may_commit: Callable[[], bool]) -> bool:
        def has_lines() -> bool:
            return (lines is None or lines.exception() is None) and may_commit()

        try:
            with save.model.beside_the_steps():
                has_folder = (self._store.root / str(save.name)).is_dir()  # else others need not be readable
                is_there = has_folder and self._store.find(save.name.global_step) is not None
                return is_there or self._writer.write(save, has_lines, self._is_read.set)
        finally:
            self._is_read.set()

    def conclude(self, *, required: bool) -> Refusal | None:
        """Wait for the save that was begun, if any: what did the disk refuse? The step `is_owed` a checkpoint then.

        Another failure costs the run nothing unless it is `required`: then it raises CheckpointError. The older
        checkpoints are as they were.
        """
        if self._saving is None:
            return None
        (save, saving), self._saving, is_saved = self._saving, None, False
        try:
            with self._waiting(CHECKPOINT_S):
                is_saved = saving.result()
            self.is_owed = not is_saved
        except CheckpointError as error:
            step = save.name.global_step
            self._journal.record("checkpoint.failed", subject="trainer", reason=error.message, global_step=step)
            fault = fault_of(error)
            if fault is not None:
                self.is_owed = True
                return self._refusal(fault)
            if required:
                raise
        finally:
            self._keep_next |= save.keep and not is_saved
        return None

    def _refusal(self, fault: DiskFault) -> Refusal:
        """That a save met it. It would have taken about as much as the last one; with nothing to go by, 0."""
        newest = None if self._writer.newest is None else self._writer.newest.manifest
        needed = 0 if newest is None else newest.total_bytes
        return refusal_of(self._store.root, fault, needed=needed)

    def load(self, folder: Path, model: PolicyModel, queue: PromptQueue) -> RunPosition:
        """Restore model, optimizer, RNG, data position and counters from `folder`.

        Checkpoints of later steps are set aside, as those steps are trained again. Raises CheckpointError.
        """
        self.settle()
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
        """Restore the state after a step, from memory or else from disk, verified before anything changes. Raises
        CheckpointError, as DiskError where nothing is known of the checkpoint."""
        self.settle()
        state = self._memory.find(global_step, self._store.list())
        if state is not None:
            try:
                return self._load_state(state, model, queue)
            except DiskError:
                raise
            except CheckpointError as error:
                self._journal.record("state.damaged", subject="trainer", reason=error.message, global_step=global_step)
        checkpoint = self._store.find(global_step)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint of step {global_step} in {self._store.root}")
        found = verify(checkpoint.path)
        if not found.is_complete:
            refuse_unread(checkpoint.path)
            found = verify(checkpoint.path)  # what the disk did not give a moment ago
        if not found.is_complete:
            raise CheckpointError(f"{checkpoint} can't be gone back to: {found.why_not}", "an older one is used")
        return Restored(position=self.load(checkpoint.path, model, queue))

    def _load_state(self, state: InMemoryCheckpoint, model: PolicyModel, queue: PromptQueue) -> Restored:
        restored = self._memory.load(state, model, queue)
        self._continue_from(restored.position, str(state), is_last_step_owed=True)
        return restored

    def begin_anew(self, model: PolicyModel, queue: PromptQueue, first: Mapping[str, Any]) -> RunPosition:
        """Restore the run's first weights and the data position `first`; all checkpoints are set aside."""
        self.settle()
        model.begin_anew()
        queue.load_state_dict(first)
        self._continue_from(RunPosition(), "the beginning")
        return RunPosition()

    def _continue_from(self, position: RunPosition, what: str, *, is_last_step_owed: bool = False) -> None:
        """`is_last_step_owed`: what was due after the last step may not have been done, so it counts as due again."""
        done = position.next_step - 1
        reason = f"resumed from {what}"

        def begun(aside: Path) -> None:
            """A trainer that was killed before it told nobody what a mistaken restore is to put back."""
            self._journal.record("checkpoint.setting_aside", subject=aside.name, reason=reason)

        for aside in self._store.set_aside_after(done, begun):
            self._journal.record("checkpoint.set_aside", subject=aside.name, reason=reason)
        self._memory.drop_after(done)
        if self._uploads is not None:
            self._uploads.set_back(done)
        self._writer.look()
        steps, epochs = (done, position.last_epoch) if is_last_step_owed else (position.next_step, position.epoch)
        now = time.monotonic()
        for schedule in (self._saver, self._recover, self._evaluator):
            schedule.restored(now=now, steps_done=steps, epochs_done=epochs)
