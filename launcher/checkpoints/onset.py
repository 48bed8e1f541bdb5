"""Finds when the rewards fell, looking back over the complete series: from which level, to which, since which step.

Three stages. Optimal partitioning (segments.py) gives levels; a level that lies below the run's own best by more than
its noise and its usual wandering explain is a fall, from the last step at the old level to a lasting return to it; a
broken line (old level, slope, new level) fitted by least squares dates it, which separates a decay from a drop, and its
profile gives the interval of steps in which the onset lies.

Unlike launcher/policy/reward_health.py, which must decide at each step with what came before, this knows what came
after: the steps that follow distinguish one bad batch from a fall, and spikes back to the old level end no fall.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from launcher.checkpoints.segments import Floats, partition
from launcher.policy.broken_line import date_fall

MIN_DROP = 0.15
"""A fall is at least this share of the old level's height above the worst possible reward, 0 where none was below."""
WANDERING = 4.5
"""And so many times what the level of 25 steps usually differs from that of the 25 before."""
STANDARD_ERRORS = 6.0
NOISE_FLOOR = 0.02
BLOCK_STEPS, LEAST_BLOCKS = 25, 6
ZERO_SHARE = 0.05
LEAST_BEFORE = 8
"""Steps that a level must have lasted to be one that can be lost."""
LEAST_LOW = 5
"""Low steps that make a fall: fewer are bad batches."""
RETURN_STEPS = 20
"""At the old level, in a row but for bad batches, that end a fall."""
ZERO_STREAK = 5
LOOKED_BACK = 50
CHANCE_OF_ZEROS = 1e-6
LEVEL_STEPS = 10
IN_DOUBT = 1.0
"""So many standard errors of the difference of two levels below the best."""


class Shape(enum.StrEnum):
    """How the rewards fell."""

    ZERO = "to exactly 0"
    PLATEAU = "to a lower level"
    DECAY = "slowly"
    SPIKES = "with spikes back"
    NEVER = "0 from the first step"
    MISSING = "to no reward at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """From level `before` to `after`, by indices of the series.

    `onset`: the first bad step, as estimated; it lies within `earliest` and `latest`. `bottom`: the first step at the
    new level. `end`: the first step back at the old level, None where it never came back. `zeros`: steps of exactly 0.
    """

    onset: int
    earliest: int
    latest: int
    bottom: int
    end: int | None
    before: float
    after: float
    zeros: int
    steps: int
    shape: Shape

    @property
    def is_over(self) -> bool:
        return self.end is not None

    def moved(self, rows: int) -> Self:
        """With the indices of a series in which so many rows come before."""
        end = None if self.end is None else self.end + rows
        at = {name: getattr(self, name) + rows for name in ("onset", "earliest", "latest", "bottom")}
        return dataclasses.replace(self, end=end, **at)


def standing(falls: Sequence[Fall]) -> Fall | None:
    """The fall to go back to before: the one that is not over, else the last that did harm by steps of only zeros."""
    down = [one for one in falls if not one.is_over]
    return next(iter([*down, *(one for one in reversed(falls) if one.zeros >= ZERO_STREAK)]), None)


def find_falls(rewards: Floats) -> list[Fall]:
    """All falls of a series, in order. NaN is a step without a reward: some in a row count as lost reward."""
    series, index, missing = _without_gaps(rewards)
    if len(series) < LEAST_BEFORE or not series.any():
        return _never(rewards, series, index)
    low, high = usual_range(series)
    series = np.clip(series, low, high)  # one reward of 1e37 would be all that a mean or a square still knows
    noise = _noise(series)
    falls, begin = [], 0
    while (fall := _next_fall(series, begin, noise)) is not None:
        falls.append(_in_steps(fall, index, missing))
        if fall.end is None:
            break
        begin = fall.end
    return falls


def leaves_level_at(rewards: Floats) -> int:
    """The first row from which on the level stays below the best so far, be it too little for a fall; else the length.
    0 where there are too few rows for a level."""
    n = len(rewards)
    if n < LEVEL_STEPS:
        return 0
    series = np.clip(rewards, *usual_range(rewards))
    sums = np.concatenate(([0.0], np.cumsum(series)))
    level = (sums[LEVEL_STEPS:] - sums[:-LEVEL_STEPS]) / LEVEL_STEPS
    doubt = IN_DOUBT * _noise(series) * math.sqrt(2 / LEVEL_STEPS)
    is_low = level < np.maximum.accumulate(level) - doubt
    return n if not is_low[-1] else int(np.flatnonzero(~is_low)[-1])


def usual_range(values: Floats) -> tuple[float, float]:
    """Beyond it lies what no reward function means: twice the range of the middle 96 %."""
    finite = values[np.isfinite(values)]
    low, high = (float(bound) for bound in np.quantile(finite, (0.02, 0.98))) if len(finite) else (0.0, 1.0)
    width = max(high - low, abs(high) / 10, abs(low) / 10)
    return low - width, high + width


def _without_gaps(rewards: Floats) -> tuple[Floats, np.ndarray, np.ndarray]:
    """The series without single steps that have no reward; three or more of them in a row count as 0."""
    is_nan = ~np.isfinite(rewards)
    lost = np.zeros(len(rewards), dtype=bool)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_nan, [0]))))
    for start, end in edges.reshape(-1, 2):
        lost[start:end] = end - start >= 3 and start > 0
    kept = ~is_nan | lost
    return np.where(is_nan, 0.0, rewards)[kept], np.flatnonzero(kept), lost[kept]


def _never(rewards: Floats, series: Floats, index: np.ndarray) -> list[Fall]:
    """Nothing but zeros: there is no level to fall from, and still it is no run that learns."""
    if len(series) < 2 * ZERO_STREAK or series.any():
        return []
    at = int(index[0])
    return [
        Fall(
            onset=at,
            earliest=at,
            latest=at,
            bottom=at,
            end=None,
            before=0.0,
            after=0.0,
            zeros=len(series),
            steps=len(rewards),
            shape=Shape.NEVER,
        )
    ]


def _noise(series: Floats) -> float:
    """Standard deviation of one step, from differences of neighbours: a trend does not inflate it (normal noise: the
    median of |x − y| is 0.954 σ). Zeros in a row show nothing, nor does a leap between 0 and the height."""
    height = float(np.quantile(np.abs(series), 0.98))
    pairs = np.column_stack((np.abs(series[1:]), np.abs(series[:-1])))
    is_leap = (pairs.min(axis=1) == 0) & (pairs.max(axis=1) > height / 2)
    differences = np.abs(np.diff(series))[(pairs.max(axis=1) > 0) & ~is_leap]
    return max(float(np.median(differences)) / 0.954 if len(differences) >= 5 else 0.0, NOISE_FLOOR * height, 1e-9)


def _noise_at(before: Floats) -> float:
    """The same of the old level alone, its zeros with it: E|x − y| is 2σ/√π."""
    return math.sqrt(math.pi) / 2 * float(np.abs(np.diff(before)).mean()) if len(before) > 1 else 0.0


def _wandering(before: Floats, after: Floats) -> float:
    """How much a level wanders by itself, before the fall and, where it is not down at 0, after it."""
    return max(_wander(before), _wander(after) if (after == 0).mean() < ZERO_SHARE else 0.0)


def _wander(part: Floats) -> float:
    """How much the mean of 25 steps differs from that of the 25 before it; a steady rise or fall is no wandering."""
    count = len(part) // BLOCK_STEPS
    if count < LEAST_BLOCKS:
        return 0.0
    means = part[len(part) - count * BLOCK_STEPS :].reshape(count, BLOCK_STEPS).mean(axis=1)
    steps = np.diff(means)
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps))))


class _Level(NamedTuple):
    begin: int
    end: int
    mean: float


def _next_fall(series: Floats, begin: int, noise: float) -> Fall | None:
    part = series[begin:]
    levels = [
        _Level(begin + a, begin + b, float(series[begin + a : begin + b].mean())) for a, b in partition(part, noise)
    ]
    floor = min(0.0, float(np.quantile(series, 0.02)))
    best: _Level | None = None
    for number, level in enumerate(levels):
        if best is not None and level.mean < best.mean:
            fall = _as_fall(series, begin, best, levels[number:], noise, floor)
            if fall is not None:
                return fall
        has_lasted = level.end - level.begin >= LEAST_LOW and level.end - begin >= LEAST_BEFORE
        if has_lasted and (best is None or level.mean >= best.mean - noise / 2):
            best = level
    return None


def _as_fall(
    series: Floats, begin: int, best: _Level, following: list[_Level], noise: float, floor: float
) -> Fall | None:
    """The fall from `best` to the levels that follow, if it is one."""
    level = following[0]
    top = float(series[max(best.begin, best.end - LOOKED_BACK) : best.end].mean())
    drop = top - level.mean
    if drop < MIN_DROP * (top - floor):
        return None
    middle = top - drop / 2
    end = _returned(series, level.begin, middle)
    low = series[level.begin : end if end is not None else len(series)]
    if drop < WANDERING * _wandering(series[begin : best.end], low):
        return None
    low_steps = int((low < middle).sum())
    n_before = min(best.end - best.begin, LOOKED_BACK)
    error = max(noise, _noise_at(series[max(begin, best.end - 2 * LOOKED_BACK) : best.end]))
    error *= math.sqrt(1 / max(low_steps, 1) + 1 / max(n_before, 1))
    if low_steps < LEAST_LOW or drop < STANDARD_ERRORS * error:
        return None
    if _is_usual_zero(series[begin : best.end], low):
        return None
    stop = end if end is not None else len(series)
    first = max(begin, best.begin, best.end - LOOKED_BACK - 10)
    dated = date_fall(series[:stop].tolist(), first=first, noise=noise, top=top, near=level.begin)
    episode = series[dated.onset : stop]
    after = float(np.median(series[dated.bottom : stop])) if stop > dated.bottom else level.mean
    zeros = int((episode == 0).sum())
    return Fall(
        onset=dated.onset,
        earliest=dated.earliest,
        latest=dated.latest,
        bottom=dated.bottom,
        end=end,
        before=top,
        after=after,
        zeros=zeros,
        steps=len(episode),
        shape=_shape(episode, middle, zeros, dated.bottom - dated.onset),
    )


def _returned(series: Floats, begin: int, middle: float) -> int | None:
    """The first step of a lasting return above `middle`: of the next 20 steps, three may be bad."""
    above = series[begin:] >= middle
    if len(above) < RETURN_STEPS:
        return None
    counts = np.convolve(above, np.ones(RETURN_STEPS), mode="valid")
    ends = np.flatnonzero((counts >= RETURN_STEPS - 3) & above[: len(counts)])
    return begin + int(ends[0]) if len(ends) else None


def _is_usual_zero(before: Floats, low: Floats) -> bool:
    """Where rewards are rare, zeros follow one another by chance: no fall before that is unlikely."""
    share = float((before == 0).mean())
    streak = int((low == 0).sum())
    return share > 0 and streak == len(low) and share**streak > CHANCE_OF_ZEROS


def _shape(episode: Floats, middle: float, zeros: int, slope_steps: int) -> Shape:
    spikes = int((episode >= middle).sum())
    if slope_steps >= 8 and zeros < 0.5 * len(episode):
        return Shape.DECAY
    if zeros >= 0.9 * len(episode):
        return Shape.ZERO
    if slope_steps >= 8:
        return Shape.DECAY
    return Shape.SPIKES if spikes >= 2 else Shape.PLATEAU


def _in_steps(fall: Fall, index: np.ndarray, missing: np.ndarray) -> Fall:
    """With the indices of the complete series."""
    stop = fall.end if fall.end is not None else len(index)
    is_missing = missing[fall.onset : stop].mean() > 0.5
    return dataclasses.replace(
        fall,
        onset=int(index[fall.onset]),
        earliest=int(index[fall.earliest]),
        latest=int(index[fall.latest]),
        bottom=int(index[min(fall.bottom, len(index) - 1)]),
        end=None if fall.end is None else int(index[fall.end]),
        shape=Shape.MISSING if is_missing else fall.shape,
    )
