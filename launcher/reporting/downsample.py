"""Reduces a long series to as many points as a screen has pixels, with the range of values behind each point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
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

    @property
    def steps_text(self) -> str:
        return f"step {self.first:.0f}" if self.count == 1 else f"steps {self.first:.0f} to {self.last:.0f}"


def downsample(points: Sequence[Point], most: int) -> list[Bin]:
    """At most `most` bins of equally many points, in order."""
    size = max(-(-len(points) // most), 1)
    return [_bin(points[start : start + size]) for start in range(0, len(points), size)]


def _bin(points: Sequence[Point]) -> Bin:
    values = [value for _, value in points if math.isfinite(value)]
    return Bin(
        first=points[0][0],
        last=points[-1][0],
        mean=sum(values) / len(values) if values else math.nan,
        low=min(values, default=math.nan),
        high=max(values, default=math.nan),
        count=len(points),
    )


def running_mean(points: Sequence[Point], window: int, most: int) -> list[Point]:
    """(x, mean of the `window` values up to there) at about `most` places, the last one among them.

    NaN is left out. Each from its own window: a running total would carry one absurd value on for ever.
    """
    size = max(-(-len(points) // most), 1)
    ends = range(len(points), 0, -size)
    return [(points[end - 1][0], _bin(points[max(end - window, 0) : end]).mean) for end in reversed(ends)]
