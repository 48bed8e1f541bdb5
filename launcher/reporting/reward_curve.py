"""The reward curve of a run as a picture: what it learned, what was thrown away, and what happened on the way."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.durable import replace_file
from launcher.base.errors import JournalError
from launcher.base.messages import EvalReport
from launcher.reporting.run_records import RunRecords
from launcher.reporting.run_view import MEAN_OVER_STEPS

INK, FAINT_INK, GRID = "#1f2430", "#6b7280", "#e5e7eb"
REWARD_COLOUR, SAMPLED_COLOUR, GREEDY_COLOUR, TROUBLE_COLOUR = "#2563eb", "#d97706", "#059669", "#dc2626"

INCIDENTS = ("server.died", "batch.rejected", "reward.collapsed", "trainer.died", "checkpoint.condemned")
"""Events that are drawn as trouble where they happened."""

LEGEND_COLUMNS = 5
WINDOWS_ACROSS = 50
"""The mean is over 10 steps, as everywhere, but never over less than this part of a long run: noise would hide it."""

Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What is drawn, over `global_step`: the weights that made a step's rollouts are those of that version.

    Rewards are NaN where a step had none. `taken_back` are steps that a restore undid; `restores`, `incidents` and
    `checkpoints` are the steps at which these happened.
    """

    title: str
    subtitle: str = ""
    rewards: tuple[Point, ...] = ()
    taken_back: tuple[Point, ...] = ()
    evals: tuple[EvalReport, ...] = ()
    restores: tuple[int, ...] = ()
    incidents: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()


def curve_of(records: RunRecords, *, title: str, subtitle: str = "") -> Curve:
    """The curve that a run's records tell."""
    return Curve(
        title=title,
        subtitle=subtitle,
        rewards=tuple((step.global_step, step.reward) for step in records.steps),
        taken_back=tuple((step.global_step, step.reward) for step in records.taken_back),
        evals=records.evals,
        restores=_steps_of(records, "trainer.restored"),
        incidents=_steps_of(records, *INCIDENTS),
        checkpoints=_steps_of(records, "checkpoint.committed"),
    )


def _steps_of(records: RunRecords, *names: str) -> tuple[int, ...]:
    return tuple(event.global_step for event in records.events_named(*names) if event.global_step is not None)


def moving_mean(values: Sequence[float], window: int = MEAN_OVER_STEPS) -> list[float]:
    """Of each value and up to `window` - 1 before it, passing over NaN; NaN where none of them is a number."""
    means = []
    for end in range(1, len(values) + 1):
        seen = [value for value in values[max(end - window, 0) : end] if math.isfinite(value)]
        means.append(sum(seen) / len(seen) if seen else math.nan)
    return means


def draw_curve(curve: Curve, path: Path) -> None:
    """Write the picture as PNG, whole or not at all. Raises JournalError where it can't be drawn or written."""
    try:
        from matplotlib.figure import Figure  # takes half a second, and only a run that ends has need of it

        figure = Figure(figsize=(10, 5.2), dpi=150, facecolor="white")
        _draw(figure, curve)
        data = io.BytesIO()
        figure.savefig(data, format="png")
        replace_file(path, data.getvalue())
    except (ImportError, OSError) as error:
        raise JournalError(f"{path} was not written: {error}", "metrics.jsonl beside it holds the figures") from error


def _draw(figure: Any, curve: Curve) -> None:
    axes = figure.add_axes((0.07, 0.2, 0.86, 0.65))
    _frame(figure, axes, curve)
    _scale(axes, curve)
    _draw_rewards(axes, curve)
    _draw_evals(axes, curve.evals)
    _draw_marks(axes, curve)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = len(labels) if len(labels) <= LEGEND_COLUMNS else -(-len(labels) // 2)
        figure.legend(
            handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK,
            handletextpad=0.5, columnspacing=1.6, labelspacing=0.6, bbox_to_anchor=(0.5, 0.005),
        )  # fmt: skip


def _frame(figure: Any, axes: Any, curve: Curve) -> None:
    # parse_math: a name such as `lr$1$` is not a formula
    figure.text(0.07, 0.935, curve.title, fontsize=14, fontweight="bold", color=INK, parse_math=False)
    figure.text(0.07, 0.885, curve.subtitle, fontsize=9.5, color=FAINT_INK, parse_math=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT_INK, labelsize=9, length=0, pad=6)
    axes.set_xlabel("global step", color=FAINT_INK, fontsize=9.5)


def _scale(axes: Any, curve: Curve) -> None:
    """From 0 to 1 where all is within, as accuracies and most rewards are; two runs then compare at a glance."""
    shown = [reward for _, reward in (*curve.rewards, *curve.taken_back) if math.isfinite(reward)]
    if all(0 <= value <= 1 for value in shown):
        axes.set_ylim(-0.03, 1.03)
    steps = [step for step, _ in (*curve.rewards, *curve.taken_back)] + [e.policy_version for e in curve.evals]
    last = max([*steps, 1])
    axes.set_xlim(-0.01 * last, 1.01 * last)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_rewards(axes: Any, curve: Curve) -> None:
    if curve.taken_back:
        steps, rewards = zip(*curve.taken_back, strict=True)
        axes.scatter(steps, rewards, s=12, marker="x", linewidths=0.8, color=TROUBLE_COLOUR, alpha=0.45,
                     label="taken back by a restore")  # fmt: skip
    if not curve.rewards:
        axes.text(0.5, 0.5, "no step was committed", transform=axes.transAxes, ha="center", color=FAINT_INK)
        return
    steps, rewards = zip(*curve.rewards, strict=True)
    size = 14 if len(steps) <= 500 else 4
    axes.scatter(steps, rewards, s=size, color=REWARD_COLOUR, alpha=0.22, linewidths=0, label="reward of a step")
    window = max(MEAN_OVER_STEPS, len(steps) // WINDOWS_ACROSS)
    means = moving_mean(rewards, window)
    axes.plot(steps, means, color=REWARD_COLOUR, linewidth=2.2, solid_capstyle="round",
              label=f"mean of {window} steps")  # fmt: skip
    if math.isfinite(means[-1]):
        axes.annotate(f"{means[-1]:.2f}", (steps[-1], means[-1]), xytext=(14, 0), textcoords="offset points",
                      va="center", fontweight="bold", color=REWARD_COLOUR, annotation_clip=False)  # fmt: skip


def _draw_evals(axes: Any, evals: Sequence[EvalReport]) -> None:
    if not evals:
        return
    versions = [report.policy_version for report in evals]
    for name, values, colour, marker in (
        ("sampled", [report.sampled for report in evals], SAMPLED_COLOUR, "o"),
        ("greedy", [report.greedy for report in evals], GREEDY_COLOUR, "D"),
    ):
        axes.plot(versions, values, color=colour, marker=marker, markersize=6.5, markeredgecolor="white",
                  linewidth=1, linestyle=(0, (1, 3)), clip_on=False, zorder=5, label=f"held-out, {name}")  # fmt: skip


def _draw_marks(axes: Any, curve: Curve) -> None:
    """What happened: resumes as lines over the full height, incidents and checkpoints as marks along the bottom."""
    for number, step in enumerate(curve.restores):
        axes.axvline(step + 0.5, color=FAINT_INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1,
                     label="resumed here" if number == 0 else None)  # fmt: skip
    bottom = axes.get_xaxis_transform()
    if curve.incidents:
        axes.scatter(curve.incidents, [0.055] * len(curve.incidents), transform=bottom, marker="v", s=38,
                     color=TROUBLE_COLOUR, linewidths=0, zorder=4, label="incident")  # fmt: skip
    if curve.checkpoints:
        axes.scatter(curve.checkpoints, [0.015] * len(curve.checkpoints), transform=bottom, marker="|", s=40,
                     linewidths=1.2, color=FAINT_INK, label="checkpoint")  # fmt: skip
