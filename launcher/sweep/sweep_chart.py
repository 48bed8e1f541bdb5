"""Draws a sweep: a row for each trial, a panel for each figure, how each ended, and what is recommended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.reporting.png_figure import FAINT_INK, GRID, INK, REWARD_COLOUR, TROUBLE_COLOUR, hide_spines, write_png
from launcher.resources.memory_estimate import MIB
from launcher.sweep.recommendation import Advice
from launcher.sweep.sweep_report import ending, incidents
from launcher.sweep.trial_results import TrialResult, TrialStatus

BEST_COLOUR, OTHER_COLOUR = REWARD_COLOUR, "#93b4f5"
ROW_INCHES, LEAST_INCHES = 0.42, 2.6

PANELS: tuple[tuple[str, str, Callable[[TrialResult], float | None]], ...] = (
    ("peak memory, MiB", ",.0f", lambda result: _peak_mib(result)),
    ("tokens/s in rollouts", ",.0f", lambda result: result.tokens_per_s),
    ("step, s (median)", ".2f", lambda result: result.step_s),
    ("reward, last 10 steps", ".3f", lambda result: result.reward),
)


def draw(title: str, results: Sequence[TrialResult], advice: Advice, path: Path) -> None:
    """Write the picture, complete or not at all. Raises JournalError where it can't be drawn or written."""
    height = max(LEAST_INCHES, 1.6 + ROW_INCHES * len(results))
    write_png(
        lambda figure: _draw(figure, title, results, advice), path, remedy="sweep.csv beside it holds the figures",
        figsize=(12, height), dpi=130, layout="constrained",
    )  # fmt: skip


def _draw(figure: Any, title: str, results: Sequence[TrialResult], advice: Advice) -> None:
    best = advice.best.trial.name if advice.best is not None else ""
    figure.suptitle(f"{title}\n{advice.lines()[0]}", fontsize=11, color=INK, x=0.01, ha="left", parse_math=False)
    axes = figure.subplots(1, len(PANELS) + 1, sharey=True)
    for axis, (name, form, value) in zip(axes, PANELS, strict=False):
        _bars(axis, name, form, [value(result) for result in results], [r.trial.name == best for r in results])
    _incidents(axes[-1], results)
    axes[0].set_yticks(range(len(results)), [_label(result) for result in results], fontsize=8, parse_math=False)
    axes[0].set_ylim(len(results) - 0.4, -0.6)  # the first trial on top
    for label, result in zip(axes[0].get_yticklabels(), results, strict=True):
        label.set_color(INK if result.status is TrialStatus.FINISHED else TROUBLE_COLOUR)
        label.set_fontweight("bold" if result.trial.name == best else "normal")


def _bars(axis: Any, name: str, form: str, values: Sequence[float | None], is_best: Sequence[bool]) -> None:
    _frame(axis, name)
    for row, (value, best) in enumerate(zip(values, is_best, strict=True)):
        if value is not None:
            axis.barh(row, value, height=0.62, color=BEST_COLOUR if best else OTHER_COLOUR)
            axis.text(value, row, f" {value:{form}}", va="center", fontsize=8, color=INK)
    largest = max((value for value in values if value is not None), default=0.0)
    axis.set_xlim(min(0.0, *(value or 0.0 for value in values)), largest * 1.3 if largest > 0 else 1.0)


def _incidents(axis: Any, results: Sequence[TrialResult]) -> None:
    """As text: stacked bars for the counts of several causes can't be read at this size."""
    _frame(axis, "incidents and end")
    axis.set_xlim(0, 1)
    for row, result in enumerate(results):
        lines = [incidents(result)] if result.incidents else []
        lines += [ending(result)] if result.status is not TrialStatus.FINISHED else []
        colour = TROUBLE_COLOUR if lines else FAINT_INK
        axis.text(0.02, row, "\n".join(lines) or "none", va="center", fontsize=8, color=colour)


def _frame(axis: Any, name: str) -> None:
    axis.set_title(name, fontsize=9.5, color=FAINT_INK, loc="left")
    hide_spines(axis, but="left", colour=GRID)
    axis.tick_params(length=0, labelbottom=False)


def _label(result: TrialResult) -> str:
    settings = result.trial.settings.items()
    return "\n".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings) or result.trial.name


def _peak_mib(result: TrialResult) -> float | None:
    size = result.peak.gpu if result.peak.gpu is not None else result.peak.all
    return None if size is None else size / MIB
