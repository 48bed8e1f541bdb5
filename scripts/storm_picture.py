"""Draws a storm as a picture, from the files of its run: `python -m scripts.storm_picture LOGS --output storm.png`.

The reward of each step, and each fault at the step at which it fired.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.reporting.downsample import running_mean
from launcher.reporting.png_figure import FAINT_INK, GRID, INK, REWARD_COLOUR, TROUBLE_COLOUR, hide_spines, write_png
from launcher.reporting.run_facts import RunFacts, read_facts
from launcher.reporting.run_view import mean_window
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended
from scripts.faults.outcome import FaultOutcome
from scripts.run_choice import add_run_arguments, chosen_run
from scripts.storm import read_result

NAMES = {  # of the kinds that scripts.storm injects by default; another one shows its code
    "C1": "server killed",
    "C2": "server hangs",
    "C5": "old weights",
    "C7": "all servers killed",
    "M1": "{target} killed",
    "T1": "trainer killed",
    "T2": "trainer hangs",
    "T3": "rewards overflow",
}
ROWS = 4
"""Names of faults that follow each other closely are at different heights."""


def main(arguments: Sequence[str] | None = None) -> int:
    made = Parser("storm_picture", "Draw a storm, from the files of its run.", "0 drawn; 2 the command is wrong")
    add_run_arguments(made)
    made.add_argument("--output", type=Path, default=Path("storm.png"), help="picture to write (default: storm.png)")
    return ended(lambda: _picture(made.parse_args(arguments)))


def _picture(given: argparse.Namespace) -> int:
    paths = chosen_run(given)
    faults = read_result(paths, seed=0, asked=0, exit_code=0, seconds=0.0).outcomes
    facts = read_facts(paths)
    if not faults or not facts.steps:
        raise UsageError(f"no fault was injected into {paths.logs}", "give the logs of a run of scripts.storm")
    draw_storm(facts, faults, given.output)
    return DONE


def draw_storm(facts: RunFacts, faults: Sequence[FaultOutcome], path: Path) -> None:
    """Raises JournalError where it can't be drawn or written."""
    draw = partial(_draw, facts=facts, faults=faults)
    write_png(draw, path, remedy="give another --output", figsize=(10, 4.4), dpi=150)


def _draw(figure: Any, *, facts: RunFacts, faults: Sequence[FaultOutcome]) -> None:
    undone = sum(fault.taken_back for fault in faults)
    title = f"{len(faults)} faults in {len(facts.steps)} steps, {undone or 'no'} step{'s' * (undone != 1)} undone"
    figure.text(0.06, 0.93, title, fontsize=14, fontweight="bold", color=INK)
    axes = figure.add_axes((0.06, 0.11, 0.89, 0.55))
    hide_spines(axes, but="bottom", colour=FAINT_INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT_INK, labelsize=9, length=0, pad=6)
    axes.set_xlabel("global step", color=FAINT_INK, fontsize=9.5)
    axes.set_ylabel("reward", color=FAINT_INK, fontsize=9.5)
    axes.set_ylim(bottom=0.0)
    points = [(float(line.step), line.reward) for line in facts.steps]
    axes.scatter(*zip(*points, strict=True), s=12, color=REWARD_COLOUR, alpha=0.25, linewidths=0)
    means = running_mean(points, mean_window(len(points)), len(points))
    axes.plot(*zip(*means, strict=True), color=REWARD_COLOUR, linewidth=2.2)
    for number, fault in enumerate(faults):
        top = 1.05 + 0.085 * (ROWS - 1 - number % ROWS)
        step = -1 if fault.step is None else fault.step
        at = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot([step, step], [0, top], color=TROUBLE_COLOUR, linewidth=0.9, alpha=0.6, **at)
        name = NAMES.get(fault.kind, fault.kind).format(target=fault.target.title().replace("_", ""))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(step + 0.8, top, name, fontsize=8.5, color=TROUBLE_COLOUR, va="center", bbox=box, **at)


if __name__ == "__main__":
    sys.exit(main())
