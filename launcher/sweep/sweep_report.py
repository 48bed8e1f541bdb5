"""Shows the results of a sweep: a table for the terminal, the trial that it recommends, and the same figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from launcher.reporting.terminal_text import SafeConsole
from launcher.sweep.trial_results import TrialResult, TrialStatus

NONE = "–"
STYLES = {TrialStatus.FINISHED: "green", TrialStatus.ERRORED: "red", TrialStatus.REFUSED: "red"}


class Figure(NamedTuple):
    """One figure of a trial: its column in sweep.csv and in the table, and how the table writes it."""

    column: str
    title: str
    form: str
    value: Callable[[TrialResult], float | None]


FIGURES = (
    Figure("steps", "steps", "d", lambda result: result.steps),
    Figure("reward", "reward", ".3f", lambda result: result.reward),
    Figure("tokens_per_s", "tokens/s", ",.0f", lambda result: result.tokens_per_s),
    Figure("step_s", "step s", ".2f", lambda result: result.step_s),
)


CLOSE = 0.05
"""Steps this much slower, as a share, are no different: each was measured in one run."""
HELD = "FINISHED, never ran out of memory and has steps with a time"
"""What `rank` asks for. One of a single step of another project's trainer has no time of a step."""


def rank(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Those that FINISHED and never ran out of memory, by the median of their steps; the first is recommended."""
    held = [one for one in results if one.status is TrialStatus.FINISHED and not one.ran_out_of_memory]
    return sorted((one for one in held if one.step_s is not None), key=lambda one: one.step_s or 0.0)


def recommendation(ranked: Sequence[TrialResult]) -> str:
    """One sentence on the first, `rank`'s answer being given."""
    if not ranked:
        return f"no setting can be recommended: no trial {HELD}"
    best, *others = ranked
    why = f"the fastest step of the {len(ranked)} that {HELD}"
    if others and (others[0].step_s or 0.0) <= (1 + CLOSE) * (best.step_s or 0.0):
        why += f"; {others[0].trial} is so close that one run of each can't separate them"
    return f"recommended: {best.trial} ({why})"


def show(results: Sequence[TrialResult], console: SafeConsole) -> None:
    """Print the table and the recommended trial, which is marked. A figure that no trial has gets no column."""
    ranked = rank(results)
    shown = [figure for figure in FIGURES if any(figure.value(result) is not None for result in results)]
    table = Table("", *(key.rpartition(".")[2] for key in results[0].trial.settings), "ended", box=SIMPLE_HEAD)
    for figure in shown:
        table.add_column(figure.title, justify="right")
    table.add_column("incidents")
    for result in results:
        is_best = result in ranked[:1]
        table.add_row(
            "→" if is_best else "",
            *map(Text, result.trial.settings.values()),
            Text(ending(result), style=STYLES.get(result.status, "yellow")),
            *(_text(figure, result) for figure in shown),
            incidents(result) or NONE,
            style="bold" if is_best else "",
        )
    console.print(table)
    console.print(recommendation(ranked), soft_wrap=True)


def _text(figure: Figure, result: TrialResult) -> str:
    value = figure.value(result)
    return NONE if value is None else format(value, figure.form)


def ending(result: TrialResult) -> str:
    """Its status, and where it halted the cause."""
    return f"{result.status} {result.cause}" if result.cause is not None else str(result.status)


def incidents(result: TrialResult) -> str:
    """`2 server_crash, 1 server_oom`."""
    return ", ".join(f"{count} {cause}" for cause, count in sorted(result.incidents.items()))


def as_csv(results: Sequence[TrialResult]) -> bytes:
    """A line for each trial; empty where there is no figure. Times in seconds."""
    keys = list(results[0].trial.settings)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [figure.column for figure in FIGURES]
    writer.writerow(["trial_name", *keys, "ended", "cause", *columns, "incidents", "reason"])
    for one in results:
        head = [one.trial.name, *(one.trial.settings[key] for key in keys), one.status, one.cause]
        row = [*head, *(figure.value(one) for figure in FIGURES), incidents(one), " ".join(one.reason.split())]
        writer.writerow(["" if value is None else value for value in row])
    return text.getvalue().encode()
