"""The surroundings of the onset: which events, how many, and how the figures before it differ from those after.

From three steps before the onset to five after, in steps where a log counts them and in time otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from launcher.checkpoints.onset import Shape
from launcher.diagnosis.judging.step_history import FoundFall
from launcher.diagnosis.reading.log_records import Contents, Floats, Kind, LogEvent, Role

STEPS_BEFORE, STEPS_AFTER = 3, 5
COMPARED_BEFORE, COMPARED_AFTER = 30, 10
MARGIN_S = 12.0


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
    found: FoundFall | None = None
    onset_step: int | None = None
    since: float | None = None
    until: float | None = None
    first_step: int | None = None
    last_step: int | None = None

    def near(self, *kinds: Kind, role: Role | None = None) -> list[LogEvent]:
        """The events of these kinds around the onset."""
        return [h for h in self._of(*kinds) if self._is_near(h) and role in (None, h.role)]

    def earlier(self, *kinds: Kind) -> list[LogEvent]:
        """Those before that."""
        return [h for h in self._of(*kinds) if self._is_earlier(h)]

    def unplaced(self, *kinds: Kind) -> list[LogEvent]:
        """Those that may be near, or not: nothing shows when they were, among the steps."""
        return [h for h in self._of(*kinds) if self.onset_step is not None and h.time is None and h.after_step is None]

    def _of(self, *kinds: Kind) -> list[LogEvent]:
        return [h for h in self.contents.log_events if h.kind in kinds]

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

    def series(self, name: str) -> Floats:
        """A figure in the steps that the fall is one of, by its indices; empty where there is no fall."""
        found: Floats = self.contents.steps.column(name)[self.found.rows if self.found else slice(0)]
        return found

    def change(self, name: str) -> Change | None:
        """How a figure differs; None where too few steps have it."""
        if self.found is None:
            return None
        series, fall = self.series(name), self.found.fall
        begin = fall.bottom if fall.shape is Shape.DECAY else fall.onset
        before = _finite(series[max(0, fall.onset - COMPARED_BEFORE) : fall.onset])
        after = _finite(series[begin : begin + COMPARED_AFTER])
        if len(before) < 5 or len(after) < 2:
            return None
        middle = float(np.median(before))
        noise = 1.4826 * float(np.median(np.abs(before - middle)))
        return Change(before=middle, after=float(np.median(after)), noise=noise)

    def has_vanished(self, name: str) -> bool:
        """Is the figure there before the onset, and not from it on?"""
        if self.found is None:
            return False
        series, onset = np.isfinite(self.series(name)), self.found.fall.onset
        before, after = series[max(0, onset - 10) : onset], series[onset : onset + 10]
        return bool(len(before) and len(after) and before.mean() > 0.8 and after.mean() < 0.3)

    def peak_before(self, name: str) -> tuple[float, float, int] | None:
        """(largest value, usual value, step) of a figure in the 20 steps just before the fall."""
        if self.found is None:
            return None
        series, onset = self.series(name), self.found.fall.onset
        begin = max(0, onset - 20)
        usual, near = _finite(series[max(0, begin - 100) : begin]), series[begin : onset + 3]
        if len(usual) < 10 or not np.isfinite(near).any():
            return None
        at = int(np.nanargmax(np.where(np.isfinite(near), near, -np.inf)))
        return float(near[at]), float(np.median(usual)), int(self.contents.steps.steps[self.found.rows[begin + at]])


def _finite(values: Floats) -> Floats:
    finite: Floats = values[np.isfinite(values)]
    return finite


def context_of(contents: Contents, found: FoundFall | None) -> IncidentContext:
    """The surroundings of a fall; without one, of the end of the log; without a step, the complete log."""
    numbers, times = contents.steps.steps, contents.steps.times
    if found is not None:
        rows, onset = found.rows, found.fall.onset
        begin, end = max(0, onset - STEPS_BEFORE), min(len(rows) - 1, onset + STEPS_AFTER)
        return IncidentContext(
            contents=contents,
            found=found,
            onset_step=int(numbers[rows[onset]]),
            since=_known(times[rows[max(0, begin - 1)]] - MARGIN_S),
            until=_known(times[rows[end]] + MARGIN_S),
            first_step=int(numbers[rows[begin]]),
            last_step=int(numbers[rows[end]]),
        )
    if not len(numbers):
        return IncidentContext(contents=contents)
    since, last = _known(times[max(0, len(numbers) - 2)]), int(numbers[-1])
    until = None if since is None else math.inf
    return IncidentContext(
        contents=contents, onset_step=last + 1, since=since, until=until, first_step=last, last_step=last + 2
    )


def _known(time: float) -> float | None:
    return float(time) if math.isfinite(time) else None
