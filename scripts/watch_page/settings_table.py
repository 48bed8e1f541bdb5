"""The settings of runs side by side, by their dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.reporting.terminal_text import visible
from launcher.run_files.run_paths import RunPaths
from scripts.health.recorded_run import read_run_settings

LONGEST = 300


def settings_table(runs: Sequence[RunPaths]) -> list[dict[str, object]]:
    """One row for each key: its value in each run (None: it has no such setting), and whether they differ."""
    columns = [dict(_flat(read_run_settings(paths))) for paths in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key) for column in columns]) for key in keys]
    return [{"key": visible(key), "values": values, "differs": len({*values}) > 1} for key, values in rows]


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", visible("null" if value is None else str(value))[:LONGEST]
