"""What a benchmark of faults leaves: raw points of each cell, results.json, results.md, results.png."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from launcher.base.durable import replace_file
from launcher.reporting.ledger_audit import counts_in_words
from launcher.reporting.png_figure import FAINT_INK, GRID, INK, REWARD_COLOUR, TROUBLE_COLOUR, hide_spines, write_png
from scripts.lab.fault_bench.measures import LOST
from scripts.lab.fault_bench.verdicts import RUN, CellResult, MarkRole, MarkVerdict, ahead, unbelievable


def write_results(folder: Path, about: Mapping[str, object], results: Sequence[CellResult]) -> None:
    """Anew after each cell. Raises JournalError where the picture can't be written, OSError where a file can't."""
    for one in results:
        if one.status == RUN:
            points = [{"measure": name, "value": value} for name, values in one.measures.items() for value in values]
            lines = "".join(json.dumps(point) + "\n" for point in points)
            replace_file(folder / f"{one.name}.jsonl", lines.encode())
    problems = unbelievable(results)
    content = {**about, "problems": problems, "cells": [asdict(one) for one in results]}
    replace_file(folder / "results.json", (json.dumps(content, indent=1) + "\n").encode())
    replace_file(folder / "results.md", markdown(about, results).encode())
    if shown := [one for one in results if one.measures.get("semantic_ettr")]:
        draw = partial(_draw, results=shown)
        write_png(draw, folder / "results.png", remedy="see its folder", figsize=(10, 1.6 + 0.42 * len(shown)), dpi=150)


def markdown(about: Mapping[str, object], results: Sequence[CellResult]) -> str:
    lines = [f"{key}: {value}  " for key, value in about.items()]
    head = ("cell", "arm", "faults", "ETTR", "semantic", "pace", "lost a fault", "detected", "next step", "undone")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [_arm_row(one) for one in results if one.measures.get("semantic_ettr")]
    lines += ["", said] if (said := ahead(results, "storm", ("resume", "by_hand", "slow_probes"))) else []
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


def _draw(figure: Any, *, results: Sequence[CellResult]) -> None:
    """Left the shares of time, right each fault's seconds until the next step."""
    names = [f"{one.name}: {one.arm}" for one in results]
    rows = range(len(results))
    shares, seconds = figure.add_axes((0.3, 0.2, 0.3, 0.66)), figure.add_axes((0.66, 0.2, 0.31, 0.66))
    for axes, label in ((shares, "semantic ETTR (ETTR in grey)"), (seconds, "seconds from a fault to the next step")):
        hide_spines(axes, but="bottom", colour=FAINT_INK)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.tick_params(colors=FAINT_INK, labelsize=8.5, length=0, pad=5)
        axes.set_xlabel(label, color=FAINT_INK, fontsize=9)
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_yticks(rows, names if axes is shares else [""] * len(names), color=INK)
        axes.set_axisbelow(True)
    shares.set_xlim(0, 1)
    for name, height, colour in (("ettr", 0.6, GRID), ("semantic_ettr", 0.32, REWARD_COLOUR)):
        shares.barh(rows, [_only(one.measures, name) or 0.0 for one in results], height=height, color=colour)
    seconds.set_xscale("log")
    for row, one in zip(rows, results, strict=True):
        points = one.measures.get("next_step_s", ())
        seconds.scatter(points, [row] * len(points), s=22, color=TROUBLE_COLOUR, alpha=0.55, linewidths=0)
