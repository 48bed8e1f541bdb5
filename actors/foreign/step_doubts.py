"""Says once what shows that a setting can't be right by which another project's trainer is read or resumed. Nothing is
done about it: it may be right, and only unusual."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from actors.foreign.foreign_steps import STEPS_TIMED
from actors.supervision.run_history import RunHistory
from launcher.adapters.trainer_adapter import StepSeen
from launcher.policy.observed import TRAINER
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import Record, number_of

WITHOUT_REWARD = 10


class StepDoubts:
    """`begin` with each incarnation, `look` at each of its steps. `reads`: the setting that says how steps are read."""

    def __init__(self, history: RunHistory, reads: str) -> None:
        self._history = history
        self._reads = reads
        self._told: set[str] = set()
        self._start_step = FIRST_WEIGHTS
        self._latest = math.inf
        self._steps = self._rewards = 0

    def begin(self, start_step: int, lines: Sequence[Record]) -> None:
        """It is to resume from a step. `lines`: of the steps until now, which show how far apart they are."""
        steps = [number_of(line.get("global_step")) for line in lines[-STEPS_TIMED:]]
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        self._start_step = start_step
        self._latest = start_step + 1 + max(gaps, default=math.inf)
        self._steps = self._rewards = 0

    def note_step(self, seen: StepSeen) -> None:
        if not self._steps and not self._start_step <= seen.step <= self._latest:
            begins = "begin anew" if self._start_step == FIRST_WEIGHTS else f"resume from step {self._start_step}"
            than = ", as from a later checkpoint that it keeps elsewhere" if seen.step > self._latest else ""
            self.tell(f"it was to {begins} and began at step {seen.step}{than}: check trainer.resume")
        self._steps += 1
        self._rewards += seen.reward is not None or "reward" in seen.nonfinite
        if self._steps == WITHOUT_REWARD and not self._rewards:
            self.tell(f"no reward was seen in {WITHOUT_REWARD} steps, so that no fall is noticed: check {self._reads}")

    def tell(self, what: str) -> None:
        """Once for each setting that it names; "" is nothing."""
        if what and (setting := what.rpartition(": ")[2]) not in self._told:
            self._told.add(setting)
            self._history.event("trainer.unwatched", subject=TRAINER, reason=what)
