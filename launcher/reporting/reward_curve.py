"""The reward curve of a run as a PNG: what it learned, what was undone, and what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.base.messages import EvalReport
from launcher.reporting.downsample import Point, running_mean
from launcher.reporting.png_figure import (
    FAINT_INK,
    GREEDY_COLOUR,
    GRID,
    INK,
    REWARD_COLOUR,
    SAMPLED_COLOUR,
    TROUBLE_COLOUR,
    hide_spines,
    write_png,
)
from launcher.reporting.run_facts import RunFacts
from launcher.reporting.run_view import mean_window
from launcher.run_log.step_line import StepLine

LEGEND_COLUMNS = 5
MOST_MEANS = 2000
"""Places of the mean curve: more than the picture has columns of pixels."""


def draw_curve(facts: RunFacts, path: Path, *, subtitle: str = "") -> None:
    """Write the picture, complete or not at all. Raises JournalError where it can't be drawn or written."""
    remedy = "metrics.jsonl beside it holds the figures"
    write_png(partial(_draw, facts=facts, subtitle=subtitle), path, remedy=remedy, figsize=(10, 5.2), dpi=150)


def _draw(figure: Any, *, facts: RunFacts, subtitle: str) -> None:
    # parse_math: a name such as `lr$1$` is not a formula
    figure.text(0.07, 0.935, facts.title, fontsize=14, fontweight="bold", color=INK, parse_math=False)
    figure.text(0.07, 0.885, subtitle, fontsize=9.5, color=FAINT_INK, parse_math=False)
    axes = figure.add_axes((0.07, 0.2, 0.86, 0.65))
    hide_spines(axes, but="bottom", colour=FAINT_INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT_INK, labelsize=9, length=0, pad=6)
    axes.set_xlabel("global step", color=FAINT_INK, fontsize=9.5)
    points = _points(facts.steps)
    taken_back = [point for segment in facts.taken_back for point in _points(segment)]
    _set_scale(axes, [*points, *taken_back], facts.evals)
    _draw_rewards(axes, points, taken_back)
    _draw_evals(axes, facts.evals)
    _draw_marks(axes, facts)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = len(labels) if len(labels) <= LEGEND_COLUMNS else -(-len(labels) // 2)
        figure.legend(
            handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK,
            handletextpad=0.5, columnspacing=1.6, labelspacing=0.6, bbox_to_anchor=(0.5, 0.005),
        )  # fmt: skip


def _points(lines: Sequence[StepLine]) -> list[Point]:
    return [(line.step, line.reward if math.isfinite(line.reward) else math.nan) for line in lines]


def _set_scale(axes: Any, points: Sequence[Point], evals: Sequence[EvalReport]) -> None:
    """From 0 to 1 where all is within, as accuracies and most rewards are; two runs then compare at a glance."""
    if all(0 <= reward <= 1 for _, reward in points if math.isfinite(reward)):
        axes.set_ylim(-0.03, 1.03)
    last = max([1.0, *(step for step, _ in points), *(report.policy_version for report in evals)])
    axes.set_xlim(-0.01 * last, 1.01 * last)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_rewards(axes: Any, points: Sequence[Point], taken_back: Sequence[Point]) -> None:
    if taken_back:
        axes.scatter(*zip(*taken_back, strict=True), s=12, marker="x", linewidths=0.8, color=TROUBLE_COLOUR,
                     alpha=0.45, label="undone by a restore")  # fmt: skip
    if not points:
        axes.text(0.5, 0.5, "no step was committed", transform=axes.transAxes, ha="center", color=FAINT_INK)
        return
    axes.scatter(*zip(*points, strict=True), s=14 if len(points) <= 500 else 4, color=REWARD_COLOUR, alpha=0.22,
                 linewidths=0, label="reward of a step")  # fmt: skip
    window = mean_window(len(points))
    means = running_mean(points, window, MOST_MEANS)
    axes.plot(*zip(*means, strict=True), color=REWARD_COLOUR, linewidth=2.2, solid_capstyle="round",
              label=f"mean of {window} steps")  # fmt: skip
    if math.isfinite(means[-1][1]):
        axes.annotate(f"{means[-1][1]:.2f}", means[-1], xytext=(14, 0), textcoords="offset points", va="center",
                      fontweight="bold", color=REWARD_COLOUR, annotation_clip=False)  # fmt: skip


def _draw_evals(axes: Any, evals: Sequence[EvalReport]) -> None:
    versions = [report.policy_version for report in evals]
    for name, colour, marker in (("sampled", SAMPLED_COLOUR, "o"), ("greedy", GREEDY_COLOUR, "D")):
        if evals:
            axes.plot(versions, [getattr(report, name) for report in evals], color=colour, marker=marker,
                      markersize=6.5, markeredgecolor="white", linewidth=1, linestyle=(0, (1, 3)), clip_on=False,
                      zorder=5, label=f"held-out, {name}")  # fmt: skip


def _draw_marks(axes: Any, facts: RunFacts) -> None:
    """What happened: restores as lines over the full height, incidents and checkpoints as marks along the bottom."""
    for number, restore in enumerate(facts.restores):
        axes.axvline(restore.step + 0.5, color=FAINT_INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1,
                     label="restored to here" if number == 0 else None)  # fmt: skip
    rows = (
        (0.055, "incident", [one.step for one in facts.incidents],
         {"marker": "v", "s": 38, "color": TROUBLE_COLOUR, "linewidths": 0, "zorder": 4}),
        (0.015, "checkpoint", [one.step for one in facts.checkpoints],
         {"marker": "|", "s": 40, "color": FAINT_INK, "linewidths": 1.2}),
    )  # fmt: skip
    for height, label, steps, style in rows:
        if steps:
            axes.scatter(steps, [height] * len(steps), transform=axes.get_xaxis_transform(), label=label, **style)
