"""What the operator gave: files and folders of AReaL's, ours or WandB's, found out by what they are, and read.

A folder is read for what it holds. Where it has `merged.log`, that file alone: the others are in it. Of several sources
of steps the one with the most counts, except logs that follow one another in time, which are joined.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher.base.errors import DataError, StorageError
from launcher.diagnosis.reading.leveldb_log import MAGIC
from launcher.diagnosis.reading.log_file import read_log
from launcher.diagnosis.reading.log_records import (
    REWARD,
    Contents,
    FigureNames,
    Kind,
    LogEvent,
    Role,
    Source,
    Steps,
    is_metric,
)
from launcher.diagnosis.reading.own_run import read_events, read_metrics
from launcher.diagnosis.reading.wandb_tables import read_csv, read_offline

Said = Callable[[int], None]


class Format(enum.StrEnum):
    METRICS = "metrics.jsonl"
    EVENTS = "events.jsonl"
    LOG = "log"
    CSV = "csv"
    WANDB = "wandb"
    NONE = "none"
    """In a folder that was given: packed, or no text."""


ORDER = tuple(Format)
"""Events come after the metrics by whose times they are placed."""
STARTS = (Kind.SERVER_READY, Kind.SERVER_LAUNCHED)
"""A run's own events tell these better than its servers' logs."""
PACKED = {b"\x1f\x8b": "gunzip", b"(\xb5/\xfd": "unzstd", b"PK\x03\x04": "unzip", b"\xfd7zXZ": "unxz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file to read. `bytes`: its length now. `is_named`: by the operator, so that it must be of use.
    `problem`: of one that is not read."""

    path: Path
    format: Format
    bytes: int
    is_named: bool = True
    problem: str = ""


def find_inputs(paths: Sequence[Path]) -> list[Input]:
    """The files to read, each once. Raises UsageError, naming what is not there, empty, or holds nothing to read."""
    found: dict[Path, Input] = {}
    for path in paths:
        for file in _files_of(path):
            found.setdefault(file.path.resolve(), file)
    return sorted(found.values(), key=lambda one: (ORDER.index(one.format), str(one.path)))


def _files_of(path: Path) -> list[Input]:
    try:
        if path.is_dir():
            return _files_in(path)
        if not path.exists():
            raise StorageError(f"{path} does not exist", _what_is_near(path))
        return [_input(path)]
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}", "check its permissions") from error


def _what_is_near(path: Path) -> str:
    parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in parent.iterdir())
    shown = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
    return f"{parent} exists and holds {shown or 'nothing'}"


def _input(path: Path) -> Input:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty", "give a file with something in it, or the folder that it lies in")
    return Input(path=path, format=_format_of(path), bytes=size)


def _found(path: Path) -> Input:
    """In a folder that was given: one file of another kind there does not keep the others from being read."""
    size = path.stat().st_size
    try:
        return Input(path=path, format=_format_of(path), bytes=size, is_named=False)
    except DataError as error:
        return Input(path=path, format=Format.NONE, bytes=size, is_named=False, problem=error.message)


def _format_of(path: Path) -> Format:
    with path.open("rb") as file:
        head = file.read(65536)
    for magic, command in PACKED.items():
        if head.startswith(magic):
            raise DataError(f"{path} is packed", f"unpack it first: {command} {path}")
    if head.startswith(MAGIC) or path.suffix == ".wandb":
        return Format.WANDB
    if path.suffix == ".csv":
        return Format.CSV
    if path.suffix == ".jsonl" or head.lstrip()[:1] == b"{":
        return Format.EVENTS if b'"event"' in head else Format.METRICS
    if head.count(b"\0") > len(head) // 1000:
        raise DataError(f"{path} is no text", "give a log, a WandB export (.csv), or a .wandb file")
    return Format.LOG


def _files_in(folder: Path) -> list[Input]:
    named = [path for path in (folder / "metrics.jsonl", folder / "events.jsonl") if path.is_file()]
    logs = sorted(path for path in folder.glob("*.log*") if path.is_file() and path.suffix != ".tail")
    merged = [path for path in logs if path.name == "merged.log"]
    logs = [path for path in merged or logs if path.name != "ray.log"]
    tables = sorted(folder.glob("*.csv")) + sorted(folder.glob("*.wandb"))
    files = [*named, *logs, *tables]
    if not named and not any(path.stat().st_size for path in logs):
        files += sorted(folder.glob("**/offline-run-*/*.wandb")) + sorted(folder.glob("files/*.wandb"))
    whole = [_found(path) for path in files if path.stat().st_size]
    if any(one.format is not Format.NONE for one in whole):
        return whole
    if whole:
        _format_of(whole[0].path)  # says what it is instead
    if files:
        raise DataError(f"every log in {folder} is empty", "the run wrote nothing; look at its launcher's own output")
    raise DataError(f"{folder} holds no log", _runs_below(folder))


def _runs_below(folder: Path) -> str:
    marks = ("metrics.jsonl", "trainer.log", "merged.log", "llm_server.log")
    runs = sorted({path.parent for mark in marks for depth in range(1, 6) for path in folder.glob("*/" * depth + mark)})
    if not runs:
        return "give a run's log folder (trainer.log, merged.log or metrics.jsonl lie in it), or single files"
    more = f" and {len(runs) - 6} more" if len(runs) > 6 else ""
    return "give one of the runs below it: " + ", ".join(map(str, runs[:6])) + more


def read_inputs(inputs: Sequence[Input], *, metric: str = "", said: Said = lambda done: None) -> Contents:
    """Everything the files tell. `metric`: the reward's key. `said` hears how many bytes of all are read.

    Raises UsageError for a file that is not what it seems, and where `metric` is in none.
    """
    names, read, before = FigureNames(metric), list[Contents](), 0
    refused: list[DataError] = []
    for one in inputs:
        steps = max((c.steps for c in read), key=len, default=Steps())
        try:
            read.append(_read(one, names, metric, steps, lambda done, before=before: said(before + done)))  # type: ignore[misc]
        except DataError as error:
            if one.is_named:
                raise
            refused.append(error)
            read.append(_passed_over(one, error.message))
        before += one.bytes
        said(before)
    if len(refused) == len(inputs):
        raise refused[0]
    contents = _joined(read)
    if metric and not any(is_metric(key, metric) for key in contents.keys):
        raise DataError(f"--metric {metric} is in none of the files", f"keys: {_some(contents.keys)}")
    tables = {Format.CSV, Format.WANDB}
    if all(one.format in tables for one in inputs) and not np.isfinite(contents.steps.column(REWARD)).any():
        raise DataError(
            f"no step in {', '.join(str(one.path) for one in inputs[:3])} has a reward that is known as one",
            f"name its column: --metric KEY, of {_some(contents.keys)}",
        )
    return contents


def _passed_over(one: Input, why: str) -> Contents:
    source = Source(path=str(one.path), what="not read", role=Role.UNKNOWN, bytes=one.bytes, note=why)
    return Contents(steps=Steps(), log_events=(), sources=(source,))


def _read(one: Input, names: FigureNames, metric: str, steps: Steps, said: Said) -> Contents:
    match one.format:
        case Format.NONE:
            raise DataError(one.problem)
        case Format.METRICS:
            return read_metrics(one.path, names)
        case Format.EVENTS:
            return read_events(one.path, steps)
        case Format.CSV:
            return read_csv(one.path, names, metric)
        case Format.WANDB:
            return read_offline(one.path, names)
        case Format.LOG:
            contents, is_known = read_log(one.path, names, said)
            if not is_known:
                raise DataError(
                    f"{one.path} is no log of AReaL, SGLang or this launcher: no date, step or known word in its "
                    f"{one.bytes:,} bytes",
                    "give trainer.log, llm_server.log, merged.log, a WandB export (.csv) or a .wandb file",
                )
            return contents


def _joined(read: Sequence[Contents]) -> Contents:
    with_steps = sorted((c for c in read if len(c.steps)), key=_first_time)
    longest = max(with_steps, key=lambda c: len(c.steps), default=None)
    steps, used, end = Steps(), list[Contents](), float("-inf")
    is_log = longest is not None and longest.sources[0].what == "log"
    for contents in with_steps:
        follows = is_log and contents.sources[0].what == "log" and _first_time(contents) >= end - 1
        if contents is longest or (follows and not _overlaps(contents, longest)):
            steps.extend(contents.steps)
            used.append(contents)
            end = contents.sources[0].last_time or end
    sources = [_noted(source, contents in used) for contents in read for source in contents.sources]
    has_own = any(source.path.endswith("events.jsonl") for c in read for source in c.sources)
    told = (h for c in read for h in c.log_events if not (has_own and c.sources[0].what == "log" and h.kind in STARTS))
    log_events = sorted(_placed(told, steps), key=_when)
    keys = sorted({key for contents in read for key in contents.keys})
    return Contents(
        steps=steps,
        log_events=tuple(log_events),
        sources=tuple(sources),
        keys=tuple(keys),
        total_steps=max((contents.total_steps for contents in read), default=0),
    )


def _placed(log_events: Iterable[LogEvent], steps: Steps) -> Iterator[LogEvent]:
    """With the last step done before it, where its own file has no steps but its date is within the run's."""
    times, numbers = steps.times, steps.steps
    is_dated = bool(len(times)) and bool(np.isfinite(times).all()) and bool((np.diff(times) >= 0).all())
    for one in log_events:
        if one.after_step is not None or one.time is None or not is_dated or one.time < times[0]:
            yield one
        else:
            yield replace(one, after_step=int(numbers[np.searchsorted(times, one.time, side="right") - 1]))


def _overlaps(contents: Contents, longest: Contents | None) -> bool:
    if longest is None or contents is longest:
        return False
    first, last = contents.sources[0].first_time, contents.sources[0].last_time
    other_first, other_last = longest.sources[0].first_time, longest.sources[0].last_time
    if None in (first, last, other_first, other_last):
        return True
    return first < other_last and other_first < last  # type: ignore[operator]


def _noted(source: Source, is_used: bool) -> Source:
    if source.steps and not is_used:
        return replace(source, note="its steps are not used: another file has as many or more")
    return source


def _first_time(contents: Contents) -> float:
    time = contents.sources[0].first_time
    return float("-inf") if time is None else time


def _when(event: LogEvent) -> tuple[bool, float]:
    return event.time is None, event.time or 0.0


def _some(keys: Sequence[str]) -> str:
    likely = [key for key in keys if "reward" in key] or list(keys)
    return ", ".join(likely[:12]) + (" …" if len(likely) > 12 else "") if likely else "none"
