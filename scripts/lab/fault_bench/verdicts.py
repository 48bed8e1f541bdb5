"""Marks of cells: met, missed or not measured; and what makes the benchmark itself fail. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from scripts.lab.fault_bench.measures import Measures


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
FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {"median": median, "worst": max, "least": min, "sum": sum}


def verdict(mark: Mark, measures: Measures) -> MarkVerdict:
    points = measures.get(mark.measure, ())
    if not points:
        return MarkVerdict(mark=mark, figure=None, is_met=None)
    figure = float(FIGURES[mark.how](points))
    return MarkVerdict(mark=mark, figure=figure, is_met=figure >= mark.limit if mark.at_least else figure <= mark.limit)


def unbelievable(results: Sequence[CellResult]) -> list[str]:
    """Why the benchmark itself fails; empty where it doesn't."""
    problems = [f"cell {one.name} broke: {one.reason}" for one in results if one.status == BROKEN]
    for one in results:
        missed = sum(one.measures.get("faults_missed", ()))
        if missed and any(said.mark.role is MarkRole.MUST_MISS for said in one.verdicts):
            problems.append(f"cell {one.name}: {missed:.0f} of its faults did not come about")
            continue
        for said in one.verdicts if one.status == RUN else ():
            mark = said.mark
            if said.is_met is None and mark.role is not MarkRole.OURS:
                problems.append(f"cell {one.name} has no point of {mark.measure}")
            elif mark.role is MarkRole.NO_ALARM and not said.is_met:
                problems.append(f"cell {one.name}: nothing was injected, and {mark.measure} is {said.figure:g}")
            elif mark.role is MarkRole.MUST_MISS and said.is_met:
                problems.append(
                    f"cell {one.name}: with {mark.detector} switched off, {mark.measure} still meets {mark} "
                    f"({said.figure:g}): the cell can't see this fault"
                )
    return problems


def ahead(results: Sequence[CellResult], cell: str, others: Sequence[str]) -> str:
    """Whether `cell` has the largest semantic ETTR; empty where there is nothing to compare."""
    shares = {one.name: next(iter(one.measures.get("semantic_ettr", ())), None) for one in results}
    known = {name: share for name in others if (share := shares.get(name)) is not None}
    own = shares.get(cell)
    if own is None or not known:
        return ""
    best = max(known, key=lambda name: known[name])
    word = "ahead" if own > known[best] else "NOT ahead"
    return f"{cell} is {word} of {best}: {own:.2f} against {known[best]:.2f}"
