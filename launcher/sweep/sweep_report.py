"""What a sweep says at its end: a table for the terminal, the same as CSV, and which setting to take."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.resources.memory_estimate import MIB
from launcher.sweep.recommendation import Advice
from launcher.sweep.trial_results import TrialResult, TrialStatus

NONE = "–"
FIGURES = ("steps", "reward", "tokens/s", "step s", "peak MiB", "servers MiB", "GPU MiB")
STYLES = {TrialStatus.FINISHED: "green", TrialStatus.ERRORED: "red", TrialStatus.REFUSED: "red"}


def show(results: Sequence[TrialResult], advice: Advice, console: Console) -> None:
    """Print the table and the advice; the recommended trial is marked."""
    console.print(_table(results, advice))
    for line in advice_lines(advice):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def advice_lines(advice: Advice) -> list[str]:
    head = f"recommended: {advice.best.trial}" if advice.best is not None else "no setting can be recommended"
    return [head, f"  because: {advice.reason}", *(f"  not explored: {line}" for line in advice.unexplored)]


def _table(results: Sequence[TrialResult], advice: Advice) -> Table:
    shown = _shown_figures(results)
    table = Table("", *(key.rpartition(".")[2] for key in results[0].trial.settings), "ended", box=SIMPLE_HEAD)
    for name in shown:
        table.add_column(name, justify="right")
    table.add_column("incidents")
    for result in results:
        is_best = advice.best is not None and advice.best.trial.name == result.trial.name
        table.add_row(
            "→" if is_best else "",
            *map(Text, result.trial.settings.values()),
            Text(ended(result), style=STYLES.get(result.word, "yellow")),
            *(_figures(result)[name] for name in shown),
            incidents(result) or NONE,
            style="bold" if is_best else "",
        )
    return table


def ended(result: TrialResult) -> str:
    """Its word, and of a halt the cause."""
    return f"{result.word} {result.cause}" if result.cause is not None else str(result.word)


def incidents(result: TrialResult) -> str:
    """`2 server_crash, 1 server_oom`."""
    return ", ".join(f"{count} {cause}" for cause, count in sorted(result.incidents.items()))


def _shown_figures(results: Sequence[TrialResult]) -> list[str]:
    """All but those that no trial has, as the GPU's memory where there is none."""
    return [name for name in FIGURES if any(_figures(result)[name] != NONE for result in results)]


def _figures(result: TrialResult) -> dict[str, str]:
    peak = result.peak
    return {
        "steps": str(result.steps),
        "reward": _number(result.reward, ".3f"),
        "tokens/s": _number(result.tokens_per_s, ",.0f"),
        "step s": _number(result.step_s, ".2f"),
        "peak MiB": _mib(peak.all),
        "servers MiB": _mib(peak.servers),
        "GPU MiB": _mib(peak.gpu),
    }


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _mib(size: int | None) -> str:
    return NONE if size is None else f"{size / MIB:,.0f}"


def as_csv(results: Sequence[TrialResult]) -> bytes:
    """A line for each trial; empty where there is no figure. Sizes in bytes, times in seconds."""
    keys = list(results[0].trial.settings)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *("trial_name", *keys, "ended", "cause", "steps", "reward", "tokens_per_s", "step_s"),
            *("peak_bytes", "peak_servers_bytes", "peak_gpu_bytes", "incidents", "reason"),
        ]
    )
    for one in results:
        figures = (one.steps, one.reward, one.tokens_per_s, one.step_s, one.peak.all, one.peak.servers, one.peak.gpu)
        values = [one.trial.settings[key] for key in keys]
        ending = (one.word, one.cause)
        row = [one.trial.name, *values, *ending, *figures, incidents(one), " ".join(one.reason.split())]
        writer.writerow(["" if value is None else value for value in row])
    return text.getvalue().encode()
