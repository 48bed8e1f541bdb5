"""Benchmark `onsets`: how well the onset of a fall is found in hundreds of made series, falling and healthy ones.

Precision and recall are of series: did it find a fall where there is one, and none where there is none? The error is
found minus true onset, in steps; `covered` is how often the interval holds the true onset, `safe` how often its
beginning is not after it, which is what the choice of a checkpoint needs.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from launcher.checkpoints.onset import find_falls
from scripts.lab.benchmark.made_data import hidden_steps
from scripts.lab.benchmark.made_data.made_rewards import FALLS, HEALTHY, Drawn
from scripts.lab.benchmark.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found of one series: `error` in steps, None where nothing was found or nothing was to be found."""

    kind: str
    is_fall: bool
    found: bool
    error: int | None = None
    covered: bool | None = None
    safe: bool | None = None


def measure(each: int, seed: int = 0) -> list[Found]:
    """`each`: series of each kind."""
    kinds = [(name, make, True) for name, make in FALLS.items()] + [
        (name, make, False) for name, make in HEALTHY.items()
    ]
    return [
        judge(name, make(random.Random(f"{seed} {name} {number}")), is_fall=is_fall)
        for name, make, is_fall in kinds
        for number in range(each)
    ]


def judge(kind: str, drawn: Drawn, *, is_fall: bool) -> Found:
    """A fall counts as found where it lasts to the end, or did harm: what scripts/diagnose.py calls a failure."""
    found = [fall for fall in find_falls(np.array(drawn.rewards)) if not fall.is_over or fall.zeros >= 5]
    if not found or drawn.onset is None:
        return Found(kind=kind, is_fall=is_fall, found=bool(found))
    fall = found[0]
    return Found(
        kind=kind,
        is_fall=is_fall,
        found=True,
        error=fall.onset - drawn.onset,
        covered=fall.earliest <= drawn.onset <= fall.latest,
        safe=fall.earliest <= drawn.onset,
    )


def precision_and_recall(found: Sequence[Found]) -> tuple[float, float]:
    true = sum(one.is_fall and one.found for one in found)
    alarms = sum(one.found for one in found)
    return true / alarms if alarms else math.nan, true / sum(one.is_fall for one in found)


def table(found: Sequence[Found]) -> Iterator[str]:
    yield f"{'kind':28} series  found  error: median (5 % to 95 %)   |error| ≤ 2   covered   safe"
    for kind in dict.fromkeys(one.kind for one in found):
        yield _row(kind, [one for one in found if one.kind == kind])


def _row(kind: str, found: Sequence[Found]) -> str:
    row = f"{kind:28} {len(found):6} {sum(one.found for one in found):6}"
    errors = [one.error for one in found if one.error is not None]
    if not errors:
        return row
    near = sum(abs(error) <= 2 for error in errors) / len(errors)
    shares = [sum(bool(getattr(one, name)) for one in found) / len(errors) for name in ("covered", "safe")]
    low, middle, high = np.quantile(errors, (0.05, 0.5, 0.95))
    spread = f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"
    return f"{row}  {spread:>28} {near:13.0%} {shares[0]:9.0%} {shares[1]:6.0%}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=60, help="series of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the series")
    parser.add_argument("--hidden", type=int, default=0, metavar="N", help="also N runs of which steps are hidden")


def run(arguments: argparse.Namespace) -> Measured:
    begin = time.perf_counter()
    found = measure(arguments.each, arguments.seed)
    seconds = (time.perf_counter() - begin) / len(found)
    precision, recall = precision_and_recall(found)
    points = {"series_s": [seconds], "precision": [precision], "recall": [recall]}
    notes, raw = [*table(found)], {"series": [asdict(one) for one in found]}
    if arguments.hidden:
        advice = [hidden_steps.advise(number, arguments.seed) for number in range(arguments.hidden)]
        points["too_new"] = [float(one.too_new is not None) for one in advice]
        notes += hidden_steps.table(advice)
        raw["hidden"] = [asdict(one) for one in advice]
    return Measured(points=points, notes=notes, raw=raw)
