"""Keeps the training state after each step in memory outside the process, and restores it from there.

A step is done when its state's manifest is renamed. The state holds the step's lines of ledger and metrics too
(actors/training/step_state.py), which are written afterwards. So a trainer killed before the rename has not taken the
step; one killed after it continues after the step and first writes the missing lines
(actors/training/step_records.py). With the ledger first, a kill between the two would undo a step that was written
down.

The state is written beside the next rollouts (actors/training/checkpointing.py), straight from the model, whose weights
stay as they are until the next step is committed; and that waits for the rename. So a kill costs the one step that
was under way at most, however long the writing takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from actors.cluster.fencing import wait_for_lease
from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.training.step_state import Restored, StepState, go_back_to
from launcher.base.errors import CheckpointError, DiskError, LauncherError
from launcher.base.private_folders import make_private
from launcher.base.wording import in_one_line
from launcher.checkpoints.checkpoint_store import Checkpoint
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint, InMemoryCheckpoints, StateFacts, write_small
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schema import RunConfig
from launcher.resources.hardware import find_hardware
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

MIB = 2**20
LONGEST_REASON = 300
"""Characters: torch reports where in its source an allocation failed, with a trace."""

log = logging.getLogger("states")


class StepMemory:
    """One for each incarnation of the trainer. A state that can't be kept is an event, not an error."""

    def __init__(self, config: RunConfig, paths: RunPaths, journal: Journal) -> None:
        self._states = InMemoryCheckpoints(paths)
        self._is_on = config.recover.memory
        self._journal = journal
        self._fingerprint = config_fingerprint(config)
        self._run: float | None = None
        self._slots: int | None = None  # known when the size of a state is
        self._has_failed = False
        self._share = config.recover.memory_share
        self._next_at = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether the state after this step is to be kept."""
        return self._is_on and self._slots != 0 and time.monotonic() >= self._next_at

    def cost(self, seconds: float) -> None:
        """So long the last state has kept the steps waiting: no other for as long as makes that its share."""
        self._next_at = time.monotonic() + seconds * (1 - self._share) / self._share

    def keep(self, state: StepState, model: PolicyModel, base: Checkpoint | None) -> None:
        """From the return on no kill loses the step. `base`: the newest checkpoint on the disk.

        Raises TrainerError where a rank is lost. What else keeps a rank from writing its part is recorded.
        """
        wait_for_lease()
        try:
            if self._slots is None:
                self._slots = self._find_slots(model.state_bytes())
            if self._slots == 0:
                return
            folder = self._states.begin(self._slots)
            files = model.write_state(folder, state.training)
            files[POSITION_FILE] = write_small(folder / POSITION_FILE, state.position_file())
            self._states.commit(folder, self._facts_of(state, base), files)
        except LauncherError:
            raise  # a rank is lost
        except Exception as error:  # noqa: BLE001 - want of memory has several kinds, and costs this state only
            self._failed(state.name.global_step, error)
        else:
            self._has_failed = False

    def _facts_of(self, state: StepState, base: Checkpoint | None) -> StateFacts:
        return StateFacts(
            global_step=state.name.global_step,
            attempt=None if state.report is None else state.report.attempt,
            run=self._run,
            base=None if base is None else str(base),
            base_made_at=None if base is None or base.manifest is None else base.manifest.created_at,
            config_fingerprint=self._fingerprint,
        )

    def _find_slots(self, size: int) -> int:
        self._run = self._states.run_began()
        make_private(self._states.root)
        slots = self._states.slots_that_fit(size, find_hardware().memory_free)
        if slots < 2:
            what = "only one is kept: a kill while it is written costs the steps since the last checkpoint"
            self._journal.record(
                "state.no_room",
                subject="trainer",
                reason=f"two states after a step need {2 * size / MIB:.0f} MiB in {self._states.root.parent}; "
                + (what if slots else "none is kept: a kill costs the steps since the last checkpoint"),
            )
        if slots == 0:
            self._states.remove()
        return slots

    def _failed(self, step: int, error: Exception) -> None:
        """Recorded once, until it works again. A half-written state has no manifest."""
        if not self._has_failed:
            if isinstance(error, OSError | MemoryError):
                said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            else:  # torch's want of memory, or a defect: "'weight'" alone would not tell a KeyError
                said = f"{type(error).__name__}: {error}"
                log.error("state.failed global_step=%d", step, exc_info=error)
            why = in_one_line(said, longest=LONGEST_REASON)
            reason = f"the state after the step can't be kept in {self._states.root}: {why}"
            self._journal.record("state.failed", subject="trainer", reason=reason, global_step=step)
        self._has_failed = True

    def find(self, global_step: int, checkpoints: Sequence[Checkpoint]) -> InMemoryCheckpoint | None:
        """The state after a step, where it is still valid beside these checkpoints."""
        if not self._is_on:
            return None
        found = [state for state in self._states.current(checkpoints) if state.global_step == global_step]
        return found[-1] if found else None

    def load(self, state: InMemoryCheckpoint, model: PolicyModel, queue: PromptQueue) -> Restored:
        """Verify the state, then restore everything from it. Raises CheckpointError and drops the state; and
        DataError, where it is of another data set, DiskError, where it can't be read now."""
        try:
            state.verify()
            return go_back_to(state.path, model, queue, is_memory=True)
        except DiskError:
            raise
        except CheckpointError:
            self._states.drop(state)
            raise

    def drop_after(self, global_step: int) -> None:
        """Drop later states; all, where no states are kept any more."""
        if self._is_on:
            self._states.drop_after(global_step)
        else:
            self.remove()

    def remove(self) -> None:
        self._states.remove()
