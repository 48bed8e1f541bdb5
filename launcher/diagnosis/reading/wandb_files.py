"""Reads what WandB keeps: CSV files as its pages export them, and the `.wandb` file of an offline run.

A CSV of a chart has a column `Step` and one for each run and key, `<run> - <key>`, with `__MIN` and `__MAX` beside it;
one of a run's history has the keys themselves and `_step`. Both count steps from 0.

A `.wandb` file is LevelDB's log format (github.com/google/leveldb, doc/log_format.md) behind seven bytes (`:W&B`, a
magic number, a version): blocks of 32 KiB of pieces, each with a header (CRC-32, length, kind) and none across a block.
The checksum is zlib's CRC-32 of kind and data (LevelDB's own is CRC-32C). WandB itself has no reader of it in Python
any more. A run that was killed leaves a torn end, which ends the reading; a damaged piece loses its record alone.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.base.errors import DataError
from launcher.base.wording import some_of
from launcher.diagnosis.reading.log_records import Contents, FigureNames, Role, Source, Steps
from launcher.run_files.journal import number_of

STEP_COLUMNS = ("global_step", "_step", "Step", "step", "train/global_step")
TIME_COLUMNS = ("_timestamp", "Wall Time", "time")
SEPARATOR = " - "
OTHERS = ("__MIN", "__MAX")

MAGIC = b":W&B"
FILE_HEADER = 7
BLOCK = 32 * 1024
PIECE = struct.Struct("<IHB")
DAMAGED, COMPLETE, FIRST, MIDDLE, LAST = 0, 1, 2, 3, 4

Row = tuple[int, float | None, dict[str, float]]
"""A step, its time, and its values by key."""


def read_csv(path: Path, names: FigureNames, metric: str = "") -> Contents:
    """Raises DataError where it is no table with steps, or where several runs are in it."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        try:
            header_line = file.readline()
            is_european = header_line.count(";") > header_line.count(",")  # the comma is the decimal sign there
            file.seek(0)
            rows: Iterator[list[str]] = csv.reader(file, delimiter=";" if is_european else ",")
            if is_european:
                rows = ([cell.replace(",", ".") for cell in row] for row in rows)
            header = next(rows, [])
            keys = _keys_of(path, header, metric)
            step = next((header.index(name) for name in STEP_COLUMNS if name in header), None)
            if step is None:
                raise DataError(
                    f"{path} has no column of steps: its columns are {some_of(header, none='none')}",
                    f"export it with one of {', '.join(STEP_COLUMNS)}",
                )
            time = next((header.index(name) for name in TIME_COLUMNS if name in header), None)
            found = [parsed for row in rows if row and (parsed := _parse(row, step, time, keys))]
            steps = steps_of(sorted(found, key=lambda one: one[0]), names)  # a table may be sorted in any way
        except csv.Error as error:
            raise DataError(f"{path} is not a CSV file: {error}", "give the file that WandB exported") from error
    return contents_of(path, "WandB's CSV", steps, keys.values())


def _keys_of(path: Path, header: list[str], metric: str) -> dict[int, str]:
    """Number of each column that holds a key, and the key. Raises DataError where they are of several runs."""
    columns = {i: name for i, name in enumerate(header) if name and not name.endswith(OTHERS)}
    chart = {i: name.rsplit(SEPARATOR, 1) for i, name in columns.items() if SEPARATOR in name}
    runs = sorted({run for run, _ in chart.values()})
    if len(runs) > 1:
        chosen = [run for run in runs if metric.startswith(run + SEPARATOR)]
        if not chosen:
            raise DataError(
                f"{path} has the columns of {len(runs)} runs: {some_of(runs, most=8)}",
                f"name one column, e.g. --metric {next(n for n in columns.values() if SEPARATOR in n)!r}",
            )
        chart = {i: pair for i, pair in chart.items() if pair[0] == chosen[0]}
    if chart:
        return {i: key for i, (_, key) in chart.items()}
    return {i: name for i, name in columns.items() if name not in (*STEP_COLUMNS, *TIME_COLUMNS)}


def _parse(row: list[str], step: int, time: int | None, keys: Mapping[int, str]) -> Row | None:
    number = number_of(row[step]) if step < len(row) else math.nan
    if not math.isfinite(number):
        return None  # a torn last line
    values = {key: number_of(row[i]) for i, key in keys.items() if i < len(row) and row[i] != ""}
    at = number_of(row[time]) if time is not None and time < len(row) else math.nan
    return int(number), at if math.isfinite(at) and at > 1e8 else None, values


def read_offline(path: Path, names: FigureNames) -> Contents:
    """The history of an offline run, up to where the file is torn. Raises DataError where it is no such file."""
    from wandb.proto import wandb_internal_pb2  # half a second, and only here

    keys: set[str] = set()

    def rows() -> Iterator[Row]:
        for data in read_records(path):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): number_of(_value(i.value_json)) for i in record.history.item}
                step = items.get("global_step", items.get("_step", float(record.history.step.num)))
                if math.isfinite(step):
                    keys.update(items)
                    at = items.get("_timestamp", math.nan)
                    yield int(step), at if math.isfinite(at) else None, items

    steps = steps_of(rows(), names)
    return contents_of(path, "WandB's offline file", steps, (key for key in keys if not key.startswith("_")))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def read_records(path: Path) -> Iterator[bytes]:
    """The records up to the end, or to where the file is torn. Raises DataError where it has another beginning."""
    with path.open("rb") as file:
        head = file.read(FILE_HEADER)
        if head[:4] != MAGIC:
            raise DataError(
                f"{path} is not a .wandb file: it begins with {head[:4]!r}, not {MAGIC!r}",
                "give the run-<id>.wandb of an offline-run folder",
            )
        parts: list[bytes] | None = None  # None: what follows without a beginning belongs to what was lost
        used = FILE_HEADER
        while block := file.read(BLOCK - used):
            used = 0
            for kind, data in _pieces(block):
                if kind in (COMPLETE, FIRST):
                    parts = []
                if parts is not None:
                    parts.append(data)
                    if kind in (COMPLETE, LAST):
                        yield b"".join(parts)
                if kind in (COMPLETE, LAST, DAMAGED):
                    parts = None


def _pieces(block: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + PIECE.size <= len(block):
        checksum, length, kind = PIECE.unpack_from(block, position)
        data = block[position + PIECE.size : position + PIECE.size + length]
        is_sound = COMPLETE <= kind <= LAST and len(data) == length
        if not is_sound or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            yield DAMAGED, b""
            return
        yield kind, data
        position += PIECE.size + length


def steps_of(rows: Iterable[Row], names: FigureNames) -> Steps:
    """Rows of one step that follow each other are one: charts and logs write a step in parts."""
    steps = Steps()
    for step, group in itertools.groupby(rows, key=lambda row: row[0]):
        parts = list(group)
        values = {key: value for _, _, part in parts for key, value in part.items()}
        if figures := names.pick(values):
            steps.append(step, parts[0][1], figures)
    return steps


def contents_of(path: Path, what: str, steps: Steps, keys: Iterable[str], *, times: Sequence[float] = ()) -> Contents:
    source = Source(
        path=str(path),
        what=what,
        role=Role.UNKNOWN,
        bytes=path.stat().st_size,
        steps=len(steps),
        first_time=min(times, default=None),
        last_time=max(times, default=None),
    )
    return Contents(steps=steps, sources=(source,), keys=tuple(sorted(set(keys))))
