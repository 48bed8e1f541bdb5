"""Keeps the state after each step, in two places, and goes back to it: in memory after each step, on the disk when due.

A step waits for neither: threads of their own write the state while the next rollouts are collected.

    step N ─► collect its state ─► rollouts and gradients of N + 1 ─► wait_to_step ─► step N + 1
                   └─ to memory, renamed; then its lines; if due: copied ┴─ written, hashed, renamed; old ones pruned

Weights and moments stay as they are until the next step, so until then they are read where they are, by each rank its
part. A checkpoint outlasts that: it is written from a copy in the host's memory; where there is no room for one, from
the model, and the next step waits for that. One checkpoint at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.cluster.fencing import wait_for_lease
from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.model.training_state import TrainingState
from actors.training.run_position import RunPosition
from actors.training.step_memory import StepMemory
from actors.training.step_state import Restored, StepState, go_back_to
from launcher.base.disk_faults import DiskFault, Refusal, fault_of
from launcher.base.durable import refusal_of
from launcher.base.errors import CheckpointError, DiskError
from launcher.base.messages import Health, StepReport
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import refuse_unread
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import LEFT_FREE
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.restore_request import restore_is_asked
from launcher.checkpoints.uploads import Uploader, remote_of
from launcher.checkpoints.verification import verify
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schedule import Schedule
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

STATE_S, CHECKPOINT_S = "timeperf/state_s", "timeperf/checkpoint_s"
"""How long steps have waited for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint under way. `reading`: done when the model may step. `keep`: for good."""

    step: int
    keep: bool
    reading: Future[StepState | None]
    writing: Future[None]


class Checkpointer:
    """Saves when `saver` or `recover` is due; keeps the saver's checkpoints and the newest few of the others."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, journal: Journal, model: PolicyModel, queue: PromptQueue
    ) -> None:
        self._journal = journal
        self._model = model
        self._queue = queue
        self._store = CheckpointStore(paths.default_checkpoints)
        now = time.monotonic()
        self._saver = Schedule(config.saver, now=now)
        self._recover = Schedule(config.recover, now=now, first_steps=config.recover.first_steps)
        self._evaluator = Schedule(config.evaluator, now=now)
        self._memory = StepMemory(config, paths, journal)
        # One thread: a checkpoint is begun when its step's state is in memory and its lines are written.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._keeping: Future[None] | None = None
        self._saving: Save | None = None
        self._collected: TrainingState | None = None
        self._last: StepReport | None = None
        self._keep_next = False
        self._was_refused = False
        self.is_due = False
        self.evaluation_is_due = False
        self._stalls = {STATE_S: 0.0, CHECKPOINT_S: 0.0}
        remote = remote_of(config)
        self._uploads = (
            None if remote is None else Uploader(remote, self._store, journal, keep_last=config.recover.keep_last)
        )
        self._paths = paths
        self._catalog = CheckpointCatalog.of_run(config, paths)
        self._keep_last = config.recover.keep_last
        self._fingerprint = config_fingerprint(config)
        self._newest: Checkpoint | None = None  # the newest complete one on the disk; none before the first restore

    def step_done(self, *, ended_epoch: bool) -> None:
        """A step was committed: what is due after it? A checkpoint stays due until one is begun, and where a disk
        refuses that one."""
        now = time.monotonic()
        self._keep_next |= self._saver.step_done(ended_epoch=ended_epoch, now=now)
        self.is_due |= self._recover.step_done(ended_epoch=ended_epoch, now=now) or self._keep_next
        self.evaluation_is_due |= self._evaluator.step_done(ended_epoch=ended_epoch, now=now)

    # ── beside the steps ──

    def keep(self, position: RunPosition, report: StepReport, record: Callable[[], None]) -> None:
        """Keep the state after the step of `report` in memory: from then on no kill loses the step. Then `record` it.

        Returns before both, and `wait_to_step` after both; where memory doesn't keep it, `record` comes first.
        """
        self._last = report
        if self._memory.is_due:
            with self._waiting(STATE_S):
                state = self._collect(position)
            self._keeping = self._reader.submit(self._keep, state, record)
        else:
            record()

    def _keep(self, state: StepState, record: Callable[[], None]) -> None:
        self._memory.keep(state, self._model, self._newest)
        record()

    def save(self, position: RunPosition) -> None:
        """Begin to save the state after the last step; `conclude` comes before another one. Returns when it is written
        where the disk refused the last one, or where other ranks can't compute meanwhile."""
        if position.checkpoint_name is None:
            return
        with self._waiting(CHECKPOINT_S):
            state = self._collect(position)
            keep = self._keep_next
            self._keep_next = False
            self.is_due = False
            reading = self._reader.submit(self._read, state, keep)
            writing = self._writer.submit(self._write, reading, keep)
            self._saving = Save(step=state.name.global_step, keep=keep, reading=reading, writing=writing)
            if self._was_refused or self._model.saves_alone:
                wait([writing])

    def _read(self, state: StepState, keep: bool) -> StepState | None:
        """What `_write` has to write: a copy, which outlasts the next step. Without room for one it is written here."""
        has_folder = (self._store.root / str(state.name)).is_dir()  # else others need not be readable
        if has_folder and self._store.find(state.name.global_step) is not None:
            return None
        try:
            own = self._model.copy_to_host(state.training, share=1 - LEFT_FREE)
        except Exception as error:  # want of memory has several kinds, and costs the run a checkpoint only
            raise CheckpointError(f"checkpoint {state.name} was not copied: {error!r}") from error
        if own is None:
            self._commit(state, keep=keep)
            return None
        return replace(state, training=own)

    def _write(self, reading: Future[StepState | None], keep: bool) -> None:
        state = reading.result()
        if state is not None:
            try:
                self._commit(state, keep=keep)
            finally:
                self._model.drop_copy()

    def _commit(self, state: StepState, *, keep: bool) -> None:
        """Write a checkpoint, `keep`: for good; then prune the older ones. Raises CheckpointError."""
        wait_for_lease()
        started = time.monotonic()
        with self._store.staging(state.name) as staged:
            written = self._model.save(staged, state.training)
            (staged / POSITION_FILE).write_text(json.dumps(state.position_file()))
            wait_for_lease()
            committed = self._store.commit(
                staged,
                global_step=state.name.global_step,
                policy_version=state.policy_version,
                config_fingerprint=self._fingerprint,
                health={"reward_mean": fmean(state.position.recent_rewards), "verdict": Health.UNKNOWN},  # nobody asked
                keep=keep,
                written=written,
            )
        before = self._newest
        self._newest = committed
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

    def _collect(self, position: RunPosition) -> StepState:
        """Once a step, for both places."""
        self._collected = self._collected or self._model.training_state()
        return StepState(training=self._collected, queue=self._queue.state_dict(), position=position, report=self._last)

    def wait_to_step(self) -> float:
        """Returns, with the seconds that it took, when the weights may change. Raises what `record` raised."""
        began = time.monotonic()
        kept = self._keeping
        self._keeping = None
        if kept is not None:
            with self._waiting(STATE_S):
                wait([kept])
            self._memory.cost(self._stalls[STATE_S])
        if self._saving is not None:
            with self._waiting(CHECKPOINT_S):
                wait([self._saving.reading])
        if kept is not None:
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
        return saving is not None and not saving.writing.done()

    def settle(self) -> None:
        """Returns when nothing is being written any more, whatever became of it: the weights may change."""
        if self._keeping is not None:
            wait([self._keeping])
        if self._saving is not None:
            wait([self._saving.writing])
        self._keeping = None
        self._collected = None

    def forget(self, position: RunPosition) -> None:
        """The trainer ends: remove from memory what is on disk too."""
        self.settle()
        if self._uploads is not None:
            self._uploads.close()
        name = position.checkpoint_name
        if name is not None and self._store.find(name.global_step) is not None:
            self._memory.remove()

    def conclude(self, *, required: bool) -> Refusal | None:
        """Wait for the save that was begun, if any: what did the disk refuse? One is due at once then.

        Another failure costs the run nothing unless it is `required`: then it raises CheckpointError. The older
        checkpoints are as they were.
        """
        save = self._saving
        if save is None:
            return None
        self._saving = None
        is_saved = False
        try:
            with self._waiting(CHECKPOINT_S):
                save.writing.result()
            is_saved = True
            self._was_refused = False
        except CheckpointError as error:
            self._journal.record("checkpoint.failed", subject="trainer", reason=error.message, global_step=save.step)
            fault = fault_of(error)
            if fault is not None:
                self.is_due = True
                self._was_refused = True
                return self._refusal(fault)
            if required:
                raise
        finally:
            self._keep_next |= save.keep and not is_saved
        return None

    def _refusal(self, fault: DiskFault) -> Refusal:
        """That a save met it. It would have taken about as much as the last one; with nothing to go by, 0."""
        newest = None if self._newest is None else self._newest.manifest
        needed = 0 if newest is None else newest.total_bytes
        return refusal_of(self._store.root, fault, needed=needed)

    # ── going back ──

    def load(self, folder: Path) -> Restored:
        """Restore model, optimizer, RNG, data position and counters from `folder`.

        Checkpoints of later steps are set aside, as those steps are trained again. Raises CheckpointError.
        """
        self.settle()
        restored = go_back_to(folder, self._model, self._queue)
        self._continue_from(restored, folder.name)
        return restored

    def load_step(self, global_step: int) -> Restored:
        """Restore the state after a step, from memory or else from disk, verified before anything changes. Raises
        CheckpointError, as DiskError where nothing is known of the checkpoint."""
        self.settle()
        state = self._memory.find(global_step, self._store.list())
        if state is not None:
            try:
                restored = self._memory.load(state, self._model, self._queue)
                self._continue_from(restored, str(state))
                return restored
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
        return self.load(checkpoint.path)

    def begin_anew(self, first: Mapping[str, Any]) -> Restored:
        """Restore the run's first weights and the data position `first`; all checkpoints are set aside."""
        self.settle()
        self._model.begin_anew()
        self._queue.load_state_dict(first)
        restored = Restored(position=RunPosition())
        self._continue_from(restored, "the beginning")
        return restored

    def _continue_from(self, restored: Restored, what: str) -> None:
        """What was due after the last step of a state in memory may not have been done, so it is due again."""
        position = restored.position
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
        committed = (one for one in reversed(self._store.list()) if one.state is CheckpointState.COMMITTED)
        self._newest = next(committed, None)
        self._last = restored.last
        is_again = restored.is_from_memory
        steps, epochs = (done, position.last_epoch) if is_again else (position.next_step, position.epoch)
        now = time.monotonic()
        for schedule in (self._saver, self._recover, self._evaluator):
            schedule.restored(now=now, steps_done=steps, epochs_done=epochs)
        self.is_due = False
        self.evaluation_is_due = False
        if is_again:
            self.step_done(ended_epoch=position.epoch != position.last_epoch)
