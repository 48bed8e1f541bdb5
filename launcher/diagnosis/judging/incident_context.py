"""What was going on around the onset: which lines, how many, and how the figures before it differ from those after.

"Around" is from three steps before the onset to five after, in steps where a log counts them and in time otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.diagnosis.judging.onset import Shape
from launcher.diagnosis.judging.step_history import FoundFall
from launcher.diagnosis.reading.log_records import FIGURES, Contents, Floats, Kind, LogEvent, Role, Steps

STEPS_BEFORE, STEPS_AFTER = 3, 5
COMPARED_BEFORE, COMPARED_AFTER = 30, 10
MARGIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure's median over up to 30 steps before the onset and 10 from it on (of a decay: from its foot on); `noise`:
    its usual spread before."""

    before: float
    after: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else math.inf if self.after else 1.0

    @property
    def is_clear(self) -> bool:
        """Is the change more than the figure's own noise?"""
        return abs(self.after - self.before) > 4 * self.noise + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentContext:
    """`onset_step`: None where no step is bad (the run stopped). `since`, `until`: the time around it, seconds."""

    contents: Contents
    found: FoundFall | None
    onset_step: int | None
    since: float | None
    until: float | None
    first_step: int | None
    last_step: int | None

    def near(self, *kinds: Kind, role: Role | None = None) -> list[LogEvent]:
        """What happened around the onset."""
        return [h for h in self._of(kinds, role) if self._is_near(h)]

    def earlier(self, *kinds: Kind, role: Role | None = None) -> list[LogEvent]:
        """What happened before that."""
        return [h for h in self._of(kinds, role) if self._is_earlier(h)]

    def count(self, *kinds: Kind) -> int:
        return sum(h.count for h in self.near(*kinds))

    def _of(self, kinds: Sequence[Kind], role: Role | None) -> Iterable[LogEvent]:
        return (h for h in self.contents.log_events if h.kind in kinds and (role is None or h.role is role))

    def _is_near(self, h: LogEvent) -> bool:
        if h.time is not None and self.since is not None and self.until is not None:
            end = h.last_time if h.kind in (Kind.SILENCE, Kind.NO_TOKENS) and h.last_time is not None else h.time
            return h.time <= self.until and end >= self.since
        if h.after_step is None or self.first_step is None or self.last_step is None:
            return h.after_step is None and self.onset_step is None
        return self.first_step <= h.after_step + 1 <= self.last_step

    def _is_earlier(self, h: LogEvent) -> bool:
        if h.time is not None and self.since is not None:
            return h.time < self.since
        return h.after_step is not None and self.first_step is not None and h.after_step + 1 < self.first_step

    def has_log(self, role: Role) -> bool:
        """Was a text log of that role read?"""
        return any(s.what == "log" and s.role in (role, Role.UNKNOWN) for s in self.contents.sources)

    @property
    def has_server_log(self) -> bool:
        return any(s.what == "log" and s.role is Role.SERVER for s in self.contents.sources) or any(
            h.role is Role.SERVER for h in self.contents.log_events
        )

    def change(self, name: str) -> Change | None:
        """How a figure differs; None where too few steps have it."""
        if self.found is None:
            return None
        column, rows, onset = self.contents.steps.column(name), self.found.rows, self.found.fall.onset
        before = _finite(column[rows[max(0, onset - COMPARED_BEFORE) : onset]])
        fall = self.found.fall
        begin = fall.bottom if fall.shape is Shape.DECAY else onset
        after = _finite(column[rows[begin : begin + COMPARED_AFTER]])
        if len(before) < 5 or len(after) < 2:
            return None
        middle = float(np.median(before))
        return Change(
            before=middle, after=float(np.median(after)), noise=1.4826 * float(np.median(np.abs(before - middle)))
        )

    def vanished(self, name: str) -> bool:
        """Had the figure before the onset, and not from it on."""
        if self.found is None:
            return False
        column, rows, onset = self.contents.steps.column(name), self.found.rows, self.found.fall.onset
        before, after = column[rows[max(0, onset - 10) : onset]], column[rows[onset : onset + 10]]
        if not len(before) or not len(after):
            return False
        return bool(np.isfinite(before).mean() > 0.8 and np.isfinite(after).mean() < 0.3)

    def peak_before(self, name: str, steps: int = 20) -> tuple[float, float, int] | None:
        """(largest value, usual value, step) of a figure in the steps just before the bottom of the fall."""
        if self.found is None:
            return None
        column, rows, fall = self.contents.steps.column(name), self.found.rows, self.found.fall
        begin, end = max(0, fall.onset - steps), min(fall.onset + 3, len(rows))
        usual = _finite(column[rows[max(0, begin - 100) : begin]])
        near = column[rows[begin:end]]
        if len(usual) < 10 or not np.isfinite(near).any():
            return None
        at = int(np.nanargmax(np.where(np.isfinite(near), near, -np.inf)))
        return float(near[at]), float(np.median(usual)), int(self.contents.steps.steps[rows[begin + at]])


def _finite(values: Floats) -> Floats:
    finite: Floats = values[np.isfinite(values)]
    return finite


def context_of(contents: Contents, found: FoundFall | None) -> IncidentContext:
    """The surroundings of a fall; without one, of the end of the log."""
    steps = contents.steps
    if found is None:
        return _context_of_the_end(contents, steps)
    rows, onset = found.rows, found.fall.onset
    begin, end = max(0, onset - STEPS_BEFORE), min(len(rows) - 1, onset + STEPS_AFTER)
    numbers, times = steps.steps, steps.times
    since, until = _time(times[rows[max(0, begin - 1)]]), _time(times[rows[end]])
    return IncidentContext(
        contents=contents,
        found=found,
        onset_step=int(numbers[rows[onset]]),
        since=None if since is None else since - MARGIN_S / 10,
        until=None if until is None else until + MARGIN_S / 10,
        first_step=int(numbers[rows[begin]]),
        last_step=int(numbers[rows[end]]),
    )


def _context_of_the_end(contents: Contents, steps: Steps) -> IncidentContext:
    """From the last step but two; where there is no step, the whole log."""
    if not len(steps):
        return IncidentContext(contents=contents, found=None, onset_step=None, since=None, until=None, first_step=None,
                     last_step=None)  # fmt: skip
    numbers, times = steps.steps, steps.times
    since = _time(times[max(0, len(steps) - 2)])
    return IncidentContext(
        contents=contents,
        found=None,
        onset_step=int(numbers[-1]) + 1,
        since=since,
        until=math.inf if since is not None else None,
        first_step=int(numbers[-1]),
        last_step=int(numbers[-1]) + 2,
    )


def _time(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


KNOWN_FIGURES = tuple(FIGURES)
