"""The steps of another project's trainer: written to metrics.jsonl as they are seen, and kept for the policies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from launcher.adapters.foreign_health import metrics_line
from launcher.adapters.trainer_adapter import StepSeen
from launcher.run_files.journal import LineLog, Record, number_of, read_lines
from launcher.run_files.run_order import RESTORED
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import RunLog
from launcher.run_log.step_line import StepLine

STEPS_TIMED, MOST_LINES = 20, 4000
SKEW_S = 60.0
"""Between the clocks of two machines, at most."""


class ForeignSteps:
    """`lines`: the lines of metrics.jsonl that make up the weights as they are now. `total`: of all steps, as the
    trainer says. `beside`: figures that the next line gets, and no other. `lineage`: restores of this attempt."""

    def __init__(self, paths: RunPaths, attempt: int, events: Sequence[Record]) -> None:
        """Reads what earlier incarnations and attempts have written; `events`: theirs, as the run's memory has them.
        Raises JournalError."""
        self._attempt = attempt
        self._log = LineLog(paths.metrics)
        self._metrics = paths.metrics
        self._unwritten: list[Record] = []
        self._step_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._last: tuple[int, float] | None = None
        self.committed = 0
        self.total: int | None = None
        self.beside: Mapping[str, float] = {}
        self.lines = standing_lines(events, paths.metrics)
        mine = [one for one in events if one.get("event") == RESTORED and one.get("attempt") == attempt]
        self.lineage = max((_lineage(one) for one in mine), default=0)
        self._last_at = number_of(self.lines[-1].get("time"), 0.0) if self.lines else 0.0

    @property
    def last_step(self) -> int | None:
        return None if not self.lines else int(number_of(self.lines[-1].get("global_step")))

    @property
    def median_step_s(self) -> float | None:
        return median(self._step_s) if self._step_s else None

    @property
    def seen_now(self) -> int | None:
        """The last step of this incarnation."""
        return None if self._last is None else self._last[0]

    @property
    def seen_at(self) -> float | None:
        """When it was, on the monotonic clock."""
        return None if self._last is None else self._last[1]

    def begin(self, restored_step: int) -> None:
        """Another incarnation continues after a step: what came later counts no more."""
        self.lines = [line for line in self.lines if number_of(line.get("global_step")) <= restored_step]
        self._last = None
        self._last_at = time.time()
        self._step_s.clear()

    def take_step(self, seen: StepSeen, now: float, *, age_s: float = 0.0) -> bool:
        """False where it says nothing new. One that goes back undoes the later ones. `now`: monotonic, when it was
        taken; `age_s`: how long before, on the unix clock, where it does not say that itself."""
        if self._last is not None and seen.step == self._last[0]:
            return False
        step_s = None
        self.total = seen.total
        if self._last is not None and seen.step > self._last[0]:
            step_s = (now - self._last[1]) / (seen.step - self._last[0])
            self._step_s.append(step_s)
        self._last = (seen.step, now)
        at = self._time_of(seen, time.time(), age_s)
        line = {**metrics_line(seen, attempt=self._attempt, time=at, step_s=step_s), **self.beside}
        line["lineage"] = self.lineage
        self.beside = {}
        self._unwritten.append(line)
        kept = [earlier for earlier in self.lines[-MOST_LINES:] if number_of(earlier.get("global_step")) < seen.step]
        self.lines = [*kept, line]
        self.committed += 1
        return True

    def _time_of(self, seen: StepSeen, now: float, age_s: float) -> float:
        """Unix seconds. What it says of that itself counts only after the step before and until now: some write the
        seconds since their start under the same name, or those of another time zone."""
        is_possible = seen.at is not None and self._last_at <= seen.at <= now + SKEW_S
        at = seen.at if seen.at is not None and is_possible else now - age_s
        self._last_at = at
        return at

    def write(self) -> None:
        """Append what `take` was given to metrics.jsonl. A disk may stall it: not for a loop that answers."""
        while self._unwritten:
            self._log.append(self._unwritten[0])
            self._unwritten.pop(0)

    def withdraw(self, events: Sequence[Record]) -> None:
        """Forget what `write` has not appended: a line of an earlier step would undo those that came after it. The
        steps that these events and the lines on the disk leave standing stand again. Raises JournalError."""
        self._unwritten.clear()
        self.lines = standing_lines(events, self._metrics)


def standing_lines(events: Iterable[Record], metrics: Path) -> list[Record]:
    """The newest lines of the steps that stand, complete as they were written. Raises JournalError."""
    log = RunLog()
    for event in events:
        log.take_event(event)
    for line in read_lines(metrics):
        log.take_step(line)
    standing, _ = log.standing()
    numbers = {one.number for one in standing[-MOST_LINES:]}
    # read again: of a run of 100,000 steps, lines of which most are not wanted would fill the memory
    steps = (line for line in read_lines(metrics) if StepLine.of(line, 0) is not None)
    return [line for number, line in enumerate(steps) if number in numbers]


def _lineage(event: Record) -> int:
    lineage = event.get("lineage")
    return lineage if isinstance(lineage, int) else 0
