"""Finds when a fall began: fits a line (old level, slope, new level), and gives the onsets that fit almost as well.

Least squares over every pair (onset, bottom) of the grid. Squares are of values clipped to the two levels ± 4 standard
deviations, so that spikes and bad batches do not pull. The interval is the profile's: onsets whose sum of squares
exceeds the least by no more than 4 variances (about 95 % where steps are independent); of a slope 10, since levels
wander, which a slope takes for its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.checkpoints.segments import Floats

LONGEST_SLOPE = 1500
GRID = 160
"""Bottoms that are tried for each onset."""
CLIP = 4.0
SLOPE_STEPS = 8
INTERVAL, INTERVAL_OF_A_SLOPE = 4.0, 10.0
PARTLY_BAD = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """Indices into the series: the first bad step, between which it lies, and the first step at the new level."""

    onset: int
    earliest: int
    latest: int
    bottom: int


def date_fall(series: Floats, *, first: int, noise: float, top: float, near: int) -> Dated:
    """`series` ends where the fall does. `first`: where the old level is looked at from. `near`: the first step of the
    first lower level."""
    stop = min(len(series), near + LONGEST_SLOPE)
    after = series[near:stop]
    low = float(np.median(after[-max(5, len(after) // 3) :]))  # the level in the end: of a slope its foot
    part = np.clip(series[first:stop], min(low, top) - CLIP * noise, top + CLIP * noise)
    best, dated_bottom, profile = _fit(part, noise, low)
    width = INTERVAL if dated_bottom - best < SLOPE_STEPS else INTERVAL_OF_A_SLOPE
    allowed = np.flatnonzero(profile <= profile[best] + width)
    onset, bottom = first + best, first + dated_bottom
    if bottom - onset < 3:  # a drop: a step that was hit in part counts as bad
        while (
            onset > first + 3 and series[onset - 1] < top - PARTLY_BAD * noise and series[onset - 1] < (top + low) / 2
        ):
            onset -= 1
    earliest, latest = first + int(allowed[0]), first + int(allowed[-1])
    return Dated(onset=onset, earliest=min(earliest, onset), latest=max(latest, onset), bottom=max(bottom, onset))


def _fit(part: Floats, noise: float, low: float) -> tuple[int, int, Floats]:
    """The best onset and its bottom, and of each onset the least sum of squares, in variances."""
    n = len(part)
    t = np.arange(n, dtype=float)
    x = part / noise
    sums = {
        "x": _cumulative(x), "xx": _cumulative(x * x), "xt": _cumulative(x * t),
        "t": _cumulative(t), "tt": _cumulative(t * t),
    }  # fmt: skip
    profile, bottoms = np.full(n, np.inf), np.zeros(n, dtype=np.int64)
    for onset in range(min(3, n - 1), n):
        before, level = _flat(sums, 0, onset)
        ends = np.unique(np.geomspace(1, max(n - onset, 1), GRID).astype(np.int64)) + onset - 1
        costs = before + _ramp(sums, onset, ends, level, low / noise) + _around(sums, ends, n, low / noise)
        at = int(np.argmin(costs))
        profile[onset], bottoms[onset] = costs[at], ends[at]
    best = int(np.argmin(profile))
    return best, int(bottoms[best]), profile


def _cumulative(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _flat(s: dict[str, Floats], a: int, b: int) -> tuple[float, float]:
    """Squares about a line that rises or is level, and where it ends: a run that learns still rises before it falls."""
    n = b - a
    x, xx, xt, t, tt = (float(s[key][b] - s[key][a]) for key in ("x", "xx", "xt", "t", "tt"))
    spread_t = tt - t * t / n
    slope = (xt - x * t / n) / spread_t if spread_t > 0 and n > 10 else 0.0
    squares = xx - x * x / n
    if slope <= 0:
        return squares, x / n
    return squares - slope * slope * spread_t, x / n + slope * (b - 1 - t / n)


def _ramp(s: dict[str, Floats], onset: int, ends: np.ndarray, level: float, low: float) -> Floats:
    """Squares about the straight line from `level` (just before `onset`) to `low` (at each of `ends`)."""
    length = ends - onset + 1.0
    slope = (low - level) / length
    start = level - slope * (onset - 1)
    x, xx, xt, t, tt = (s[key][ends] - s[key][onset] for key in ("x", "xx", "xt", "t", "tt"))
    count = ends - onset
    cost: Floats = xx - 2 * start * x - 2 * slope * xt + start**2 * count + 2 * start * slope * t + slope**2 * tt
    return cost


def _around(s: dict[str, Floats], begins: np.ndarray, end: int, low: float) -> Floats:
    """Squares about the new level, which can't be fitted better by leaving steps to the slope."""
    x, xx = s["x"][end] - s["x"][begins], s["xx"][end] - s["xx"][begins]
    cost: Floats = xx - 2 * low * x + low**2 * (end - begins)
    return cost
