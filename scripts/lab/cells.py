"""Measuring in cells, within a budget of time: what is run, and which marks its figures must meet.

A cell that breaks, or has no time left, is its own result; the others go on. scripts.lab.fault_bench and
scripts.lab.gpu_smoke are tables of cells.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import median

from launcher.base.errors import UsageError

Points = dict[str, list[float]]
"""Raw points by the name of the measure, which ends with its unit: `_s` are seconds. What was not seen has no point."""
Measures = Mapping[str, Sequence[float]]


class Skipped(Exception):
    """A cell can't be run on this machine, and why."""


class MarkRole(StrEnum):
    """What a mark says if it is missed."""

    OURS = "ours"  # this system is not as good as it should be
    NO_ALARM = "no_alarm"  # nothing was injected, and something was reported: no alarm of any cell can be believed
    MUST_MISS = "must_miss"  # a detector is switched off: met, it shows that the cell can't see its fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`how`: which figure of the points is compared. `of`: the measure that says out of how many, so that a zero has
    its bound. `detector`: what is switched off (MUST_MISS)."""

    measure: str
    limit: float
    at_least: bool = False
    how: str = "median"
    of: str = ""
    role: MarkRole = MarkRole.OURS
    detector: str = ""

    def __str__(self) -> str:
        return f"{self.how} {'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkVerdict:
    """`figure` and `is_met` are None where the cell has no such point."""

    mark: Mark
    figure: float | None
    is_met: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """`status`: run, broken, not run or skipped, with the reason. `seconds`: what it took; `load`: when it began and
    ended."""

    name: str
    arm: str
    how: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    load: tuple[float, ...] = ()
    measures: Measures
    verdicts: Sequence[MarkVerdict] = ()


RUN, BROKEN, NOT_RUN, SKIPPED = "run", "broken", "not run", "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where a cell writes, and what all share. `before`: the results so far."""

    folder: Path
    seed: int = 1
    overrides: tuple[str, ...] = ()
    before: Sequence[CellResult] = ()


Way = Callable[[Workplace], Points]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`expected_s`: on two quiet cores, for the budget. `arm`: whose figures these are."""

    name: str
    arm: str = ""
    how: str
    run: Way
    marks: tuple[Mark, ...] = ()
    expected_s: float


FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {"median": median, "worst": max, "least": min, "sum": sum}


def verdict(mark: Mark, measures: Measures) -> MarkVerdict:
    points = measures.get(mark.measure, ())
    if not points:
        return MarkVerdict(mark=mark, figure=None, is_met=None)
    figure = float(FIGURES[mark.how](points))
    return MarkVerdict(mark=mark, figure=figure, is_met=figure >= mark.limit if mark.at_least else figure <= mark.limit)


def chosen(cells: Sequence[Cell], names: str | None, option: str) -> list[Cell]:
    """Those that are named, with commas between, in the order of the table; all without names. Raises UsageError."""
    if names is None:
        return [*cells]
    known = {cell.name for cell in cells}
    if unknown := [name for name in names.split(",") if name not in known]:
        said = ", ".join(cell.name for cell in cells)
        raise UsageError(f"{option} {','.join(unknown)}: no such name", f"there are {said}")
    return [cell for cell in cells if cell.name in names.split(",")]


def begin(output: Path, minutes: float, cells: Sequence[Cell]) -> float:
    """The budget in seconds; `output` is there from now on. Raises UsageError: no cell fits, the folder isn't empty."""
    least = min(cell.expected_s for cell in cells)
    if 60 * minutes < least:
        raise UsageError(f"--minutes {minutes:g}: no cell fits", f"give it {least / 60:.1f} or more")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is not an empty folder", "name a new one")
    output.mkdir(parents=True, exist_ok=True)
    return 60 * minutes


def about(tool: str, words: Sequence[str]) -> dict[str, str]:
    """What every result needs beside its figures."""
    return {
        "command": f"python -m scripts.{tool} {shlex.join(words)}".strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "load before": load_average(),
    }


def load_average() -> str:
    return " ".join(f"{one:.1f}" for one in os.getloadavg())


def measure(
    cells: Sequence[Cell], budget_s: float, place: Workplace, write: Callable[[Sequence[CellResult]], None]
) -> list[CellResult]:
    """One after the other, each in a folder of its own; `write` gets all so far after each. A cell that would not end
    in time, by how slow the machine is, is not begun."""
    began, expected_s = time.monotonic(), 0.0
    results: list[CellResult] = []
    for cell in cells:
        spent_s = time.monotonic() - began
        needs_s = cell.expected_s * max(1.0, spent_s / expected_s if expected_s else 1.0)
        if spent_s + needs_s > budget_s:
            reason = f"it needs about {needs_s:.0f} s, {budget_s - spent_s:.0f} s were left"
            results.append(_empty(cell, NOT_RUN, reason))
        else:
            print(f"── {cell.name}: {f'{cell.arm}, ' if cell.arm else ''}{cell.how}", flush=True)
            own = replace(place, folder=place.folder / "runs" / cell.name, before=tuple(results))
            results.append(run_cell(cell, own))
            expected_s += cell.expected_s * (results[-1].status == RUN)
        write(results)
    return results


def run_cell(cell: Cell, place: Workplace) -> CellResult:
    began, load = time.monotonic(), os.getloadavg()[0]
    try:
        measures = cell.run(place)
    except UsageError:
        raise
    except Skipped as skipped:
        return _empty(cell, SKIPPED, str(skipped))
    except Exception as error:  # noqa: BLE001 - whatever breaks a cell is its result; hours of others must not go with it
        broken = _empty(cell, BROKEN, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return replace(broken, seconds=time.monotonic() - began, load=(load, os.getloadavg()[0]))
    done = replace(_empty(cell, RUN, ""), measures=measures, seconds=time.monotonic() - began)
    verdicts = tuple(verdict(mark, measures) for mark in cell.marks)
    return replace(done, verdicts=verdicts, load=(load, os.getloadavg()[0]))


def _empty(cell: Cell, status: str, reason: str) -> CellResult:
    return CellResult(name=cell.name, arm=cell.arm, how=cell.how, status=status, reason=reason, measures={})
