"""Finds when a fall began: fits a line (old level, slope, new level), and gives the onsets that fit almost as well.

Least squares over every pair (onset, bottom) of the grid. Squares are of values clipped to the two levels ± 4 standard
deviations, so that spikes and bad batches do not pull. The interval is the profile's: onsets whose sum of squares
exceeds the least by no more than 4 variances (about 95 % where steps are independent); of a slope 10, since levels
wander, which a slope takes for its own.

It dates both the alarm of a run that lives (launcher/policy/change_point.py) and what is found looking back
(launcher/checkpoints/onset.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LONGEST_SLOPE = 1500
GRID = 160
"""Bottoms that are tried for each onset."""
CLIP = 4.0
SLOPE_STEPS = 8
INTERVAL, INTERVAL_OF_A_SLOPE = 4.0, 10.0
PARTLY_BAD = 4.0
LEAST_BEFORE = 3
"""Steps that the old level has at least."""
RISING_STEPS = 10
"""Fewer say nothing of whether the old level still rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """Indices into the series: the first bad step, between which it lies, and the first step at the new level."""

    onset: int
    earliest: int
    latest: int
    bottom: int


def date_fall(series: Sequence[float], *, first: int, noise: float, top: float, near: int) -> Dated:
    """`series` ends where the fall does. `first`: where the old level is looked at from. `near`: the first step of the
    first lower level."""
    stop = min(len(series), near + LONGEST_SLOPE)
    after = series[near:stop]
    low = median(after[-max(5, len(after) // 3) :])  # the level in the end: of a slope its foot
    lowest, highest = min(low, top) - CLIP * noise, top + CLIP * noise
    line = _Line([min(max(value, lowest), highest) / noise for value in series[first:stop]], low / noise)
    best, dated_bottom, profile = line.fit()
    width = INTERVAL if dated_bottom - best < SLOPE_STEPS else INTERVAL_OF_A_SLOPE
    allowed = [at for at, squares in enumerate(profile) if squares <= profile[best] + width]
    onset, bottom = first + best, first + dated_bottom
    if bottom - onset < 3:  # a drop: a step that was hit in part counts as bad
        while (
            onset > first + LEAST_BEFORE
            and series[onset - 1] < top - PARTLY_BAD * noise
            and series[onset - 1] < (top + low) / 2
        ):
            onset -= 1
    earliest, latest = first + allowed[0], first + allowed[-1]
    return Dated(onset=onset, earliest=min(earliest, onset), latest=max(latest, onset), bottom=max(bottom, onset))


class _Line:
    """The values x of steps t = 0, 1, … in standard deviations, and the level at which they end. Sums from the first
    step on, of which each stretch's is a difference, make its squares a matter of a few products."""

    def __init__(self, values: Sequence[float], low: float) -> None:
        self._n = len(values)
        self._low = low
        self._x = _summed(values)
        self._xx = _summed([x * x for x in values])
        self._xt = _summed([x * t for t, x in enumerate(values)])
        self._t = _summed([float(t) for t in range(len(values))])
        self._tt = _summed([float(t * t) for t in range(len(values))])

    def fit(self) -> tuple[int, int, list[float]]:
        """The best onset and its bottom, and of each onset the least sum of squares, in variances."""
        first = min(LEAST_BEFORE, self._n - 1)
        profile, bottoms = [math.inf] * self._n, [0] * self._n
        for onset in range(first, self._n):
            before, level = self._before(onset)
            squares, bottoms[onset] = min((self._from(onset, end, level), end) for end in _grid(onset, self._n))
            profile[onset] = before + squares
        best = min(range(self._n), key=profile.__getitem__)
        return best, bottoms[best], profile

    def _before(self, n: int) -> tuple[float, float]:
        """Squares about a line that rises or is level, and where it ends: a run that learns still rises before it
        falls."""
        x, t, tt = self._x[n], self._t[n], self._tt[n]
        spread_t = tt - t * t / n
        slope = (self._xt[n] - x * t / n) / spread_t if spread_t > 0 and n > RISING_STEPS else 0.0
        squares = self._xx[n] - x * x / n
        if slope <= 0:
            return squares, x / n
        return squares - slope * slope * spread_t, x / n + slope * (n - 1 - t / n)

    def _from(self, onset: int, end: int, level: float) -> float:
        """Squares about the straight line from `level` (just before `onset`) to the new level at `end`, and about that
        level, which can't be fitted better by leaving steps to the slope."""
        low, count = self._low, end - onset
        slope = (low - level) / (count + 1)
        start = level - slope * (onset - 1)
        x, xt = self._x[end] - self._x[onset], self._xt[end] - self._xt[onset]
        t, tt = self._t[end] - self._t[onset], self._tt[end] - self._tt[onset]
        crossed = 2 * (start * x + slope * xt - start * slope * t + low * (self._x[-1] - self._x[end]))
        return (
            self._xx[-1]
            - self._xx[onset]
            - crossed
            + start * start * count
            + slope * slope * tt
            + low * low * (self._n - end)
        )


def _grid(onset: int, n: int) -> list[int]:
    """Bottoms from `onset` on, the nearer ones closer to each other."""
    longest = max(n - onset, 1)
    lengths = {int(longest ** (k / (GRID - 1)) + 1e-9) for k in range(GRID)} if longest > 1 else {1}
    return [onset + length - 1 for length in sorted(lengths)]


def _summed(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))
