"""Shows the results of a sweep: a table for the terminal and the same figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from launcher.reporting.terminal_text import SafeConsole
from launcher.resources.memory_estimate import MIB
from launcher.sweep.recommendation import Advice
from launcher.sweep.trial_results import TrialResult, TrialStatus

NONE = "–"
STYLES = {TrialStatus.FINISHED: "green", TrialStatus.ERRORED: "red", TrialStatus.REFUSED: "red"}


class Figure(NamedTuple):
    """One figure of a trial: its column in sweep.csv and in the table, and how the table writes it."""

    column: str
    title: str
    form: str
    value: Callable[[TrialResult], float | None]
    unit: int = 1


FIGURES = (
    Figure("steps", "steps", "d", lambda result: result.steps),
    Figure("reward", "reward", ".3f", lambda result: result.reward),
    Figure("tokens_per_s", "tokens/s", ",.0f", lambda result: result.tokens_per_s),
    Figure("step_s", "step s", ".2f", lambda result: result.step_s),
    Figure("peak_bytes", "peak MiB", ",.0f", lambda result: result.peak.all, MIB),
    Figure("peak_servers_bytes", "servers MiB", ",.0f", lambda result: result.peak.servers, MIB),
    Figure("peak_gpu_bytes", "GPU MiB", ",.0f", lambda result: result.peak.gpu, MIB),
)


def show(results: Sequence[TrialResult], advice: Advice, console: SafeConsole) -> None:
    """Print the table and the advice; the recommended trial is marked. A figure that no trial has gets no column."""
    shown = [figure for figure in FIGURES if any(figure.value(result) is not None for result in results)]
    table = Table("", *(key.rpartition(".")[2] for key in results[0].trial.settings), "ended", box=SIMPLE_HEAD)
    for figure in shown:
        table.add_column(figure.title, justify="right")
    table.add_column("incidents")
    for result in results:
        is_best = advice.best is not None and advice.best.trial.name == result.trial.name
        table.add_row(
            "→" if is_best else "",
            *map(Text, result.trial.settings.values()),
            Text(ending(result), style=STYLES.get(result.status, "yellow")),
            *(_text(figure, result) for figure in shown),
            incidents(result) or NONE,
            style="bold" if is_best else "",
        )
    console.print(table)
    for line in advice.lines():
        console.print(line, soft_wrap=True)


def _text(figure: Figure, result: TrialResult) -> str:
    value = figure.value(result)
    return NONE if value is None else format(value / figure.unit if figure.unit > 1 else value, figure.form)


def ending(result: TrialResult) -> str:
    """Its status, and where it halted the cause."""
    return f"{result.status} {result.cause}" if result.cause is not None else str(result.status)


def incidents(result: TrialResult) -> str:
    """`2 server_crash, 1 server_oom`."""
    return ", ".join(f"{count} {cause}" for cause, count in sorted(result.incidents.items()))


def as_csv(results: Sequence[TrialResult]) -> bytes:
    """A line for each trial; empty where there is no figure. Sizes in bytes, times in seconds."""
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
