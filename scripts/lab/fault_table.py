"""What a benchmark of faults leaves: results.md and results.json, and whether it is to be believed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from launcher.base.durable import replace_file
from launcher.reporting.ledger_audit import counts_in_words
from scripts.lab.cells import BROKEN, RUN, CellResult, MarkRole, MarkVerdict
from scripts.lab.run_measures import LOST


def write_results(folder: Path, about: Mapping[str, object], results: Sequence[CellResult]) -> None:
    """Anew after each cell."""
    content = {**about, "problems": unbelievable(results), "cells": [asdict(one) for one in results]}
    replace_file(folder / "results.json", (json.dumps(content, indent=1) + "\n").encode())
    replace_file(folder / "results.md", markdown(about, results).encode())


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


def markdown(about: Mapping[str, object], results: Sequence[CellResult]) -> str:
    lines = [f"{key}: {value}  " for key, value in about.items()]
    head = ("cell", "arm", "faults", "ETTR", "semantic", "pace", "lost a fault", "detected", "next step", "undone")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [_arm_row(one) for one in results if one.measures.get("semantic_ettr")]
    lines += ["", said] if (said := ahead(results, "storm", ("resume", "by_hand"))) else []
    lines += ["", *told] if (told := [said for one in results if (said := _lost(one))]) else []
    lines += ["", *(f"- {one.name}: ledger: {_ledger(one)}" for one in results if one.measures.get("prompt_uses"))]
    lines += ["", "| cell | measure | figure | mark | |", "|---|---|---|---|---|"]
    lines += [_mark_row(one, said) for one in results if one.status == RUN for said in one.verdicts]
    lines += ["", *(f"- {one.name}: {one.status}, {_spent(one)}" for one in results)]
    lines += [f"- **not to be believed**: {problem}" for problem in unbelievable(results)]
    return "\n".join(lines) + "\n"


def _arm_row(one: CellResult) -> str:
    found = one.measures
    shares = [_percent(_only(found, name)) for name in ("ettr", "semantic_ettr", "pace")]
    fired, missed = (_only(found, name) or 0.0 for name in ("faults", "faults_missed"))
    lost = _only(found, "lost_steps")
    cells = [one.name, one.arm, f"{fired:.0f} of {fired + missed:.0f}", *shares, "–" if lost is None else f"{lost:.1f}"]
    cells += [_spread(found.get("detected_s", ())), _spread(found.get("next_step_s", ()))]
    cells.append(f"{sum(found.get('steps_undone', ())):.0f}")
    return f"| {' | '.join(cells)} |"


def _lost(one: CellResult) -> str:
    """Empty where there was no fault, or too few steps."""
    kinds = {name: points for name, points in one.measures.items() if name.startswith(LOST)}
    each = [
        f"{name.removeprefix(LOST)} {', '.join(f'{lost:.1f}' for lost in points)}" for name, points in kinds.items()
    ]
    return f"- {one.name}: usual steps lost from each fault to the next: {'; '.join(each)}" if each else ""


def _ledger(one: CellResult) -> str:
    times = Counter(int(often) for often in one.measures["prompt_uses"])
    steps, of_run = (_only(one.measures, name) for name in ("steps", "run_steps"))
    return counts_in_words(sorted(times.items()), int(steps or 0), None if of_run is None else int(of_run))


def _mark_row(one: CellResult, said: MarkVerdict) -> str:
    mark, figure = said.mark, "–" if said.figure is None else f"{said.figure:.3g}"
    if said.figure == 0 and mark.of and (n := sum(one.measures.get(mark.of, ()))):
        figure = f"0 of {n:.0f} (at most {min(3 / n, 1):.1%})"
    answer = {None: "not measured", True: "met", False: "missed"}[said.is_met]
    if mark.role is MarkRole.MUST_MISS:
        answer += f", as it must be with {mark.detector} off" if said.is_met is False else ""
    return f"| {one.name} | {mark.measure} | {figure} | {mark} | {answer} |"


def _spent(one: CellResult) -> str:
    if one.status != RUN:
        return one.reason
    return f"{one.seconds:.0f} s, load {' to '.join(f'{load:.1f}' for load in one.load)}: {one.how}"


def _only(found: Mapping[str, Sequence[float]], name: str) -> float | None:
    return next(iter(found.get(name, ())), None)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} s (≤ {max(seconds):.1f}, {len(seconds)}×)" if seconds else "–"
