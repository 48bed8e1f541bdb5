"""A long series as so many stretches as a screen has pixels for: the mean, the lowest and the highest of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Values at `first` to `last` on the axis. NaN where none of them is a number."""

    first: float
    last: float
    mean: float
    low: float
    high: float
    count: int

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


def downsample(points: Sequence[tuple[float, float]], most: int) -> list[Stretch]:
    """At most `most` stretches of equally many points, in order. (x, value) each."""
    size = max(-(-len(points) // most), 1)
    return [_stretch(points[start : start + size]) for start in range(0, len(points), size)]


def _stretch(points: Sequence[tuple[float, float]]) -> Stretch:
    values = [value for _, value in points if math.isfinite(value)]
    return Stretch(
        first=points[0][0],
        last=points[-1][0],
        mean=sum(values) / len(values) if values else math.nan,
        low=min(values, default=math.nan),
        high=max(values, default=math.nan),
        count=len(points),
    )


def running_mean(points: Sequence[tuple[float, float]], window: int, most: int) -> list[tuple[float, float]]:
    """(x, mean of the `window` values up to there) at about `most` places, the last one among them.

    Each from its own window: a running total would carry one absurd value on for ever.
    """
    size = max(-(-len(points) // most), 1)
    ends = range(len(points), 0, -size)
    return [(points[end - 1][0], _stretch(points[max(end - window, 0) : end]).mean) for end in reversed(ends)]
