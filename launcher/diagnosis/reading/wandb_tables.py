"""What WandB keeps: CSV files as its pages export them, and the `.wandb` file of an offline run.

A CSV of a chart has a column `Step` and one for each run and key, `<run> - <key>`, with `__MIN` and `__MAX` beside it;
one of a run's history has the keys themselves and `_step`. Both count steps from 0.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from launcher.base.errors import DataError
from launcher.diagnosis.reading.leveldb_log import read_records
from launcher.diagnosis.reading.log_clock import from_unix
from launcher.diagnosis.reading.log_records import Contents, FigureNames, Role, Source, Steps
from launcher.run_files.journal import number_of

STEP_COLUMNS = ("global_step", "_step", "Step", "step", "train/global_step")
TIME_COLUMNS = ("_timestamp", "Wall Time", "time")
SEPARATOR = " - "
OTHERS = ("__MIN", "__MAX")


def read_csv(path: Path, names: FigureNames, metric: str = "") -> Contents:
    """Raises DataError where it is no table with steps, or where several runs are in it."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        try:
            rows = csv.reader(file)
            header = next(rows, [])
            keys = _keys_of(path, header, metric)
            step = next((header.index(name) for name in STEP_COLUMNS if name in header), None)
            if step is None:
                raise DataError(
                    f"{path} has no column of steps: its columns are {_say(header)}",
                    f"export it with one of {', '.join(STEP_COLUMNS)}",
                )
            time = next((header.index(name) for name in TIME_COLUMNS if name in header), None)
            lines = (_line(row, step, time, keys) for row in rows if row)
            steps = _gather((line for line in lines if line is not None), names)
        except csv.Error as error:
            raise DataError(f"{path} is not a CSV file: {error}", "give the file that WandB exported") from error
    return _contents(path, "WandB's CSV", steps, keys.values())


def _keys_of(path: Path, header: list[str], metric: str) -> dict[int, str]:
    """Number of each column that holds a key, and the key. Raises DataError where they are of several runs."""
    columns = {i: name for i, name in enumerate(header) if name and not name.endswith(OTHERS)}
    chart = {i: name.rsplit(SEPARATOR, 1) for i, name in columns.items() if SEPARATOR in name}
    runs = sorted({run for run, _ in chart.values()})
    if len(runs) > 1:
        chosen = [run for run in runs if metric.startswith(run + SEPARATOR)]
        if not chosen:
            raise DataError(
                f"{path} has the columns of {len(runs)} runs: {', '.join(runs[:8])}",
                f"name one column, e.g. --metric {next(n for n in columns.values() if SEPARATOR in n)!r}",
            )
        chart = {i: pair for i, pair in chart.items() if pair[0] == chosen[0]}
    if chart:
        return {i: key for i, (_, key) in chart.items()}
    return {i: name for i, name in columns.items() if name not in STEP_COLUMNS and name not in TIME_COLUMNS}


def _line(
    row: list[str], step: int, time: int | None, keys: Mapping[int, str]
) -> tuple[int, float | None, dict[str, float]] | None:
    number = number_of(row[step]) if step < len(row) else math.nan
    if not math.isfinite(number):
        return None  # a torn last line
    values = {key: number_of(row[i]) for i, key in keys.items() if i < len(row) and row[i] != ""}
    at = number_of(row[time]) if time is not None and time < len(row) else math.nan
    return int(number), from_unix(at) if math.isfinite(at) and at > 1e8 else None, values


def read_offline(path: Path, names: FigureNames) -> Contents:
    """The history of an offline run, up to where the file is torn. Raises DataError where it is no such file."""
    from wandb.proto import wandb_internal_pb2  # half a second, and only here

    def lines() -> Iterator[tuple[int, float | None, dict[str, float]]]:
        for data in read_records(path):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): number_of(_value(i.value_json)) for i in record.history.item}
                step = items.get("global_step", items.get("_step", float(record.history.step.num)))
                if math.isfinite(step):
                    at = items.get("_timestamp", math.nan)
                    yield int(step), from_unix(at) if math.isfinite(at) else None, items

    seen: set[str] = set()
    steps = _gather(_noting_keys(lines(), seen), names)
    return _contents(path, "WandB's offline file", steps, (key for key in seen if not key.startswith("_")))


def _noting_keys(
    lines: Iterable[tuple[int, float | None, dict[str, float]]], seen: set[str]
) -> Iterator[tuple[int, float | None, dict[str, float]]]:
    for line in lines:
        seen.update(line[2])
        yield line


def _gather(lines: Iterable[tuple[int, float | None, dict[str, float]]], names: FigureNames) -> Steps:
    """Lines of one step that follow each other are one: charts and logs write a step in parts."""
    steps, current = Steps(), None
    for step, time, values in lines:
        if current is not None and current[0] == step:
            current[2].update(values)
            continue
        if current is not None:
            _append(steps, current, names)
        current = (step, time, dict(values))
    if current is not None:
        _append(steps, current, names)
    return steps


def _append(steps: Steps, line: tuple[int, float | None, dict[str, float]], names: FigureNames) -> None:
    figures = names.pick(line[2])
    if figures:
        steps.append(line[0], line[1], figures)


def _contents(path: Path, what: str, steps: Steps, keys: Iterable[str]) -> Contents:
    source = Source(path=str(path), what=what, role=Role.UNKNOWN, bytes=path.stat().st_size, steps=len(steps))
    return Contents(steps=steps, log_events=(), sources=(source,), keys=tuple(sorted(set(keys))))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _say(header: list[str]) -> str:
    return ", ".join(header[:12]) + (" …" if len(header) > 12 else "") if header else "none"
