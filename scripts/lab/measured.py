"""What a measuring command found, in the one form that is printed and written as JSON; and how such a command ends."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np

from scripts.ending import DONE, ended
from scripts.faults.started_run import PRESET
from scripts.lab.cells import Points, load_average

DRAWS = 4000
CONFIDENCE = 0.95
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


def mean_ratio(pairs: Pairs) -> Ratio:
    """The sum of the first over the sum of the second: what is rare and slow counts as much as it costs, which a
    median would hide. Two of a pair share what else the machine did then, so the interval comes from drawing pairs
    again (percentile bootstrap: Efron and Tibshirani, 1993, chapter 13)."""
    draw = random.Random(0)
    drawn = [_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Ratio(value=_ratio(pairs), low=float(low), high=float(high))


def _ratio(pairs: Pairs) -> float:
    return fmean(a for a, _ in pairs) / fmean(b for _, b in pairs)


def command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Measured]) -> int:
    """The exit code of a command that prints what `run` measured. It has two more arguments than the parser's."""
    parser.add_argument("--json", type=Path, help="write every raw point into this file")
    parser.add_argument("overrides", nargs="*", help=f"settings, after {PRESET}")

    def measure() -> int:
        given = parser.parse_args()
        print(f"load average before: {load_average()}", file=sys.stderr)
        measured = run(given)
        print(*measured.lines(), sep="\n")
        print(f"load average after: {load_average()}", file=sys.stderr)
        if given.json is not None:
            given.json.write_text(json.dumps(asdict(measured), indent=1) + "\n")
        return DONE

    return ended(measure)
