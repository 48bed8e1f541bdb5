"""What a benchmark found, in the one form that is printed, written as JSON, and read by scripts.lab.fault_bench. Pure.

Two things measured in the same round share what else the machine did then, so their ratio is taken round by round
and the interval comes from drawing rounds again (percentile bootstrap: Efron and Tibshirani, 1993, chapter 13).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

DRAWS = 4000
CONFIDENCE = 0.95
Points = dict[str, list[float]]
"""Raw points by the name of the measure, which ends with its unit: `_s` are seconds."""
Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio, and the interval that holds it with CONFIDENCE."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`notes`: lines for people. `raw`: what the points were taken from, for JSON."""

    points: Points
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    notes: Sequence[str] = ()
    raw: object = None

    def lines(self) -> Iterator[str]:
        width = max(map(len, self.points), default=0)
        yield from (f"{name:{width}}  {spread(figures)}" for name, figures in self.points.items() if figures)
        yield from (f"{name}: {ratio}" for name, ratio in self.ratios.items())
        yield from self.notes


def spread(figures: Sequence[float]) -> str:
    """`median (least to most, how often)`."""
    if len(figures) == 1:
        return shown(figures[0])
    return f"{shown(median(figures))} ({shown(min(figures))} to {shown(max(figures))}, {len(figures)} times)"


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.4g}"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The median of `ours[i] / theirs[i]`. Raises ValueError where they don't pair, or one isn't positive."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} figures don't make pairs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs positive figures")
    return _bootstrap(list(zip(ours, theirs, strict=True)), lambda drawn: median(a / b for a, b in drawn))


def mean_ratio(pairs: Pairs) -> Ratio:
    """The sum of the first over the sum of the second: what is rare and slow counts as much as it costs, which a
    median would hide."""
    return _bootstrap(pairs, lambda drawn: fmean(a for a, _ in drawn) / fmean(b for _, b in drawn))


def _bootstrap(pairs: Pairs, figure: Callable[[Pairs], float]) -> Ratio:
    draw = random.Random(0)
    drawn = [figure(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Ratio(value=figure(pairs), low=float(low), high=float(high))
