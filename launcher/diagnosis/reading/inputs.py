"""Finds out what the given files and folders are, reads each, and joins what was read.

A folder is read for what it holds. Where it has `merged.log`, that file alone: the others are in it. Of several sources
of steps the one with the most counts, except logs that follow one another in time, which are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher.base.errors import DataError, LauncherError, StorageError
from launcher.base.wording import some_of
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
from launcher.diagnosis.reading.wandb_files import MAGIC, read_csv, read_offline

STARTS = (Kind.SERVER_READY, Kind.SERVER_LAUNCHED)
"""A run's own events have these better than its servers' logs."""
PACKED = {b"\x1f\x8b": "gunzip", b"(\xb5/\xfd": "unzstd", b"PK\x03\x04": "unzip", b"\xfd7zXZ": "unxz"}


class PackedError(DataError):
    """A log that must be unpacked first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file to read. `bytes`: its length now. `is_named`: by the operator, so that it must be of use."""

    path: Path
    bytes: int
    is_named: bool


# ── finding ──


def find_inputs(paths: Sequence[Path]) -> list[Input]:
    """The files to read, each once. Raises UsageError, naming what is not there, empty, or holds no log."""
    found: dict[Path, Input] = {}
    for path in paths:
        try:
            files = _files_in(path) if path.is_dir() else [_named(path)]
            for file in files:
                one = Input(path=file, bytes=file.stat().st_size, is_named=not path.is_dir())
                found.setdefault(file.resolve(), one)
        except OSError as error:
            raise _unreadable(path, error) from error
    return list(found.values())


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} can't be read: {error.strerror or error}", "check its permissions")


def _named(path: Path) -> Path:
    if not path.exists():
        parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in parent.iterdir())
        raise StorageError(f"{path} does not exist", f"{parent} exists and holds {some_of(names)}")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty", "give a file with something in it, or the folder that it lies in")
    return path


def _files_in(folder: Path) -> list[Path]:
    own = [path for path in (folder / "metrics.jsonl", folder / "events.jsonl") if path.is_file()]
    logs = sorted(path for path in folder.glob("*.log*") if path.is_file() and path.suffix != ".tail")
    merged = [path for path in logs if path.name == "merged.log"]
    logs = [path for path in merged or logs if path.name != "ray.log"]
    files = [*own, *logs, *sorted(folder.glob("*.csv")), *sorted(folder.glob("*.wandb"))]
    if not own and not any(path.stat().st_size for path in logs):
        files += sorted(folder.glob("**/offline-run-*/*.wandb")) + sorted(folder.glob("files/*.wandb"))
    if not files:
        raise DataError(f"{folder} holds no log", _runs_below(folder))
    if filled := [path for path in files if path.stat().st_size]:
        return filled
    raise DataError(f"every log in {folder} is empty", "the run wrote nothing; look at its launcher's own output")


def _runs_below(folder: Path) -> str:
    marks = ("metrics.jsonl", "trainer.log", "merged.log", "llm_server.log")
    runs = sorted({path.parent for mark in marks for depth in range(1, 6) for path in folder.glob("*/" * depth + mark)})
    if not runs:
        return "give a run's log folder (trainer.log, merged.log or metrics.jsonl lie in it), or single files"
    return f"give one of the runs below it: {some_of([str(run) for run in runs], most=6)}"


# ── reading ──


def read_inputs(
    inputs: Sequence[Input], *, metric: str = "", on_progress: Callable[[int], None] = lambda done: None
) -> Contents:
    """Everything in the files. `metric`: the reward's key. `on_progress` gets the bytes read so far, of all.

    Raises UsageError for a file that is not what it seems, and where `metric` is in none.
    """
    names, read, before = FigureNames(metric), list[Contents](), 0
    refused: list[LauncherError] = []
    for one in inputs:
        try:
            read.append(_read(one.path, names, metric, lambda done, before=before: on_progress(before + done)))  # type: ignore[misc]
        except (OSError, DataError) as found:
            error = _unreadable(one.path, found) if isinstance(found, OSError) else found
            if one.is_named:
                raise error from found
            refused.append(error)
            may_hold_steps = isinstance(found, OSError | PackedError)
            source = Source(
                path=str(one.path), what="not read", role=Role.UNKNOWN, bytes=one.bytes, note=error.message,
                is_unread=may_hold_steps,
            )  # fmt: skip
            read.append(Contents(sources=(source,)))
        before += one.bytes
        on_progress(before)
    if len(refused) == len(inputs):
        raise refused[0]
    contents = _joined(read)
    rewards = [key for key in contents.keys if "reward" in key] or contents.keys
    if metric and not any(is_metric(key, metric) for key in contents.keys):
        raise DataError(f"--metric {metric} is in none of the files", f"keys: {some_of(rewards, none='none')}")
    only_tables = all(source.what.startswith("WandB") for source in contents.sources)
    if only_tables and not np.isfinite(contents.steps.column(REWARD)).any():
        raise DataError(
            f"no step in {', '.join(str(one.path) for one in inputs[:3])} has a reward that is known as one",
            f"name its column: --metric KEY, of {some_of(rewards, none='none')}",
        )
    return contents


def _read(path: Path, names: FigureNames, metric: str, on_progress: Callable[[int], None]) -> Contents:
    """By its first bytes and its name. Raises DataError where it is nothing that can be read here."""
    with path.open("rb") as file:
        head = file.read(65536)
    for magic, command in PACKED.items():
        if head.startswith(magic):
            raise PackedError(f"{path} is packed", f"unpack it first: {command} {path}")
    if head.startswith(MAGIC) or path.suffix == ".wandb":
        return read_offline(path, names)
    if path.suffix == ".csv":
        return read_csv(path, names, metric)
    if path.suffix == ".jsonl" or head.lstrip()[:1] == b"{":
        return read_events(path) if b'"event"' in head else read_metrics(path, names)
    if head.count(b"\0") > len(head) // 1000:
        raise DataError(f"{path} is no text", "give a log, a WandB export (.csv), or a .wandb file")
    return read_log(path, names, on_progress)


# ── joining ──


def _joined(read: Sequence[Contents]) -> Contents:
    used = _used_for_steps(read)
    steps, origins = Steps(), list[int]()
    for contents in used:
        steps.extend(contents.steps)
        origins += [next(i for i, one in enumerate(read) if one is contents)] * len(contents.steps)
    unused = "its steps are not used: another file has as many or more"
    sources = [
        replace(one.sources[0], note=unused) if len(one.steps) and one not in used else one.sources[0] for one in read
    ]
    has_own = any(source.path.endswith("events.jsonl") for source in sources)
    events = [e for c in read for e in c.log_events if not (has_own and _is_log(c) and e.kind in STARTS)]
    placed = (event for event in _placed(events, steps) if not _is_first_start(event))
    return Contents(
        steps=steps,
        origins=tuple(origins),
        log_events=tuple(sorted(placed, key=lambda event: (event.time is None, event.time or 0.0))),
        sources=tuple(sources),
        keys=tuple(sorted({key for contents in read for key in contents.keys})),
        total_steps=max((contents.total_steps for contents in read), default=0),
    )


def _used_for_steps(read: Sequence[Contents]) -> list[Contents]:
    """The one with the most steps; where that is a log, with it the logs that came before and after it."""
    with_steps = sorted((contents for contents in read if len(contents.steps)), key=_begin)
    longest = max(with_steps, key=lambda contents: len(contents.steps), default=None)
    used, end = list[Contents](), float("-inf")
    for contents in with_steps:
        follows = longest is not None and _is_log(longest) and _is_log(contents) and _begin(contents) >= end - 1
        if contents is longest or (follows and longest is not None and not _overlap(contents, longest)):
            used.append(contents)
            end = contents.sources[0].last_time or end
    return used


def _is_log(contents: Contents) -> bool:
    return contents.sources[0].what == "log"


def _begin(contents: Contents) -> float:
    time = contents.sources[0].first_time
    return float("-inf") if time is None else time


def _overlap(one: Contents, other: Contents) -> bool:
    a, b = one.sources[0], other.sources[0]
    if a.first_time is None or a.last_time is None or b.first_time is None or b.last_time is None:
        return True
    return a.first_time < b.last_time and b.first_time < a.last_time


def _placed(events: Iterable[LogEvent], steps: Steps) -> Iterator[LogEvent]:
    """With the last step done before each, by their times, where its own file has no steps."""
    is_dated = np.isfinite(steps.times)
    times, numbers = np.maximum.accumulate(steps.times[is_dated]), steps.steps[is_dated]
    for event in events:
        if event.after_step is not None or event.time is None or not len(times) or event.time < times[0]:
            yield event
        else:
            yield replace(event, after_step=int(numbers[np.searchsorted(times, event.time, side="right") - 1]))


def _is_first_start(event: LogEvent) -> bool:
    """A run's beginning: its first weights are loaded, and there is no step to go back from."""
    return event.kind is Kind.RESUMED and event.facts.get("global_step") == -1 and event.after_step is None
