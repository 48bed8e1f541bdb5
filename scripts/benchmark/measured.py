"""What a benchmark found, in the one form in which it is printed, written as JSON, and read by scripts.fault_bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from scripts.benchmark.ratios import Ratio

Points = dict[str, list[float]]
"""Raw points by the name of the measure, which ends with its unit: `_s` are seconds."""


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
