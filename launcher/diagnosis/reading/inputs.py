"""Finds out what the given files and folders are, reads each, and joins what was read.

A folder is read for what it holds. Where it has `merged.log`, that file alone: the others are in it. Of several sources
of steps the one with the most counts, except logs that follow one another in time, which are joined.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np

from launcher.base.errors import DataError, LauncherError, StorageError
from launcher.base.wording import some_of
from launcher.checkpoints.trial_folders import found_below
from launcher.diagnosis.reading.log_file import read_log, role_of_name
from launcher.diagnosis.reading.log_records import (
    FAILED,
    KILLS,
    NOT_READ,
    REWARD,
    TENSORBOARD,
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
from launcher.diagnosis.reading.tensorboard_files import is_event_file, read_event_file
from launcher.diagnosis.reading.time_zones import on_one_clock
from launcher.diagnosis.reading.unpacked import PackedError, extracted, head_of, is_archive, unpacked
from launcher.diagnosis.reading.wandb_files import MAGIC, read_csv, read_offline

STARTS = (Kind.SERVER_READY, Kind.SERVER_LAUNCHED)
"""A run's own events have these better than its servers' logs."""
LOGS = ("*.log*", "*.out", "*.err", "dmesg*", "kern*", "syslog*", "messages*")
"""How files are named that are read of a folder, beside tables, archives and what our runs write."""
TABLES, ARCHIVES = ("*.csv*", "*.wandb", "*.tfevents.*"), ("*.tar", "*.tar.*", "*.tgz", "*.zip")
OF_OURS = ("metrics.jsonl", "events.jsonl")
ONE_KILL_S = 600.0
"""What tells of one process within this time tells of one kill: numbers of processes are used again."""


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
    own, logs, others = (
        _matching(folder, patterns) for patterns in ([f"{name}*" for name in OF_OURS], LOGS, (*TABLES, *ARCHIVES))
    )
    merged = [path for path in logs if path.name.startswith("merged.log")]
    kernels = [path for path in logs if role_of_name(path.name) is Role.KERNEL]
    logs = [*merged, *kernels] if merged else [path for path in logs if path.name != "ray.log"]
    files = [*own, *logs, *others]
    if not own and not any(path.stat().st_size for path in logs):
        files += sorted(folder.glob("**/offline-run-*/*.wandb")) + sorted(folder.glob("files/*.wandb"))
    if not files:
        raise DataError(f"{folder} holds no log", _runs_below(folder))
    if filled := [path for path in files if path.stat().st_size]:
        return filled
    raise DataError(f"every log in {folder} is empty", "the run wrote nothing; look at its launcher's own output")


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.suffix != ".tail"}
    return sorted(found)


def _runs_below(folder: Path) -> str:
    marks = ("metrics.jsonl", "trainer.log", "merged.log", "llm_server.log")
    runs = sorted({path.parent for mark in marks for path in found_below(folder, mark)})
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
    read, before, refused = list[Contents](), 0, list[LauncherError]()
    with tempfile.TemporaryDirectory(prefix="diagnose-") as scratch:
        reader = _Reader(Path(scratch), FigureNames(metric), metric)
        for one in inputs:
            try:
                read += reader.read(one, partial(_add, on_progress, before))
            except (OSError, DataError) as found:
                error = _unreadable(one.path, found) if isinstance(found, OSError) else found
                if one.is_named:
                    raise error from found
                refused.append(error)
                read.append(_not_read(one, error, may_hold_steps=isinstance(found, OSError | PackedError)))
            before += one.bytes
            on_progress(before)
    if len(refused) == len(inputs):
        raise refused[0]
    contents = replace(_joined(read), passed_over=(*_passed_over(inputs), *reader.passed_over))
    rewards = [key for key in contents.keys if "reward" in key] or contents.keys
    if metric and not any(is_metric(key, metric) for key in contents.keys):
        raise DataError(f"--metric {metric} is in none of the files", f"keys: {some_of(rewards, none='none')}")
    only_tables = all(source.what.startswith("WandB") or source.what == TENSORBOARD for source in contents.sources)
    if only_tables and not np.isfinite(contents.steps.column(REWARD)).any():
        raise DataError(
            f"no step in {', '.join(str(one.path) for one in inputs[:3])} has a reward that is known as one",
            f"name its column: --metric KEY, of {some_of(rewards, none='none')}",
        )
    return contents


def _add(on_progress: Callable[[int], None], before: int, done: int) -> None:
    on_progress(before + done)


def _not_read(one: Input, error: LauncherError, *, may_hold_steps: bool) -> Contents:
    source = Source(
        path=str(one.path),
        what=NOT_READ,
        role=Role.UNKNOWN,
        bytes=one.bytes,
        note=error.message,
        is_unread=may_hold_steps,
    )
    return Contents(sources=(source,))


IN_MERGED, OF_A_SERVER = "its lines are in merged.log", "a server's, which tells of no step"


def _passed_over(inputs: Sequence[Input]) -> Iterator[str]:
    """Names of the files beside those that a folder was read for; of a log with the reason. Settings are read later."""
    read = {one.path for one in inputs}
    has_merged = any(path.name.startswith("merged.log") for path in read)
    for folder in sorted({one.path.parent for one in inputs if not one.is_named}):
        for path in sorted(folder.iterdir()):
            if path in read or not path.is_file() or fnmatch(path.name, "config*.yaml"):
                continue
            why = "Ray's own" if path.name == "ray.log" else IN_MERGED if has_merged else OF_A_SERVER
            why = why if path.stat().st_size else "empty"
            yield f"{path.name} ({why})" if _is_log_name(path.name) else path.name


class _Reader:
    """Reads files by what they hold; packed ones by way of `scratch`."""

    def __init__(self, scratch: Path, names: FigureNames, metric: str) -> None:
        self._scratch = scratch
        self._names = names
        self._metric = metric
        self.passed_over = list[str]()

    def read(self, one: Input, on_progress: Callable[[int], None]) -> list[Contents]:
        """Of an archive one for each of its files. Raises OSError, DataError."""
        path, note = unpacked(one.path, self._scratch)
        if not is_archive(path):
            try:
                contents = _read(path, self._names, self._metric, on_progress)
            except DataError as error:  # names the file as it was given
                message, hint = (text.replace(str(path), str(one.path)) for text in (error.message, error.hint))
                raise type(error)(message, hint) from error
            (source,) = contents.sources
            shown = replace(source, path=str(one.path), bytes=one.bytes, note=note or source.note, is_unread=bool(note))
            return [replace(contents, sources=(shown,))]
        folder, others = extracted(path, self._scratch, _is_log_name)
        self.passed_over += [f"{one.path}/{name}" for name in others]
        read = list[Contents]()
        for file in _files_of_archive(one.path, folder, others):
            inner = Input(path=file, bytes=file.stat().st_size, is_named=False)
            try:
                found = self.read(inner, lambda done: None)
            except DataError as error:
                found = [_not_read(inner, error, may_hold_steps=isinstance(error, PackedError))]
            for contents in found:
                (source,) = contents.sources
                where, note = (text.replace(str(folder), str(one.path)) for text in (source.path, source.note))
                read.append(replace(contents, sources=(replace(source, path=where, note=note),)))
        return read


def _is_log_name(name: str) -> bool:
    patterns = (*LOGS, *TABLES, *(f"{one}*" for one in OF_OURS))
    return any(fnmatch(name, pattern) for pattern in patterns)


def _files_of_archive(path: Path, folder: Path, others: Sequence[str]) -> list[Path]:
    """Its logs, in whatever folders. Raises DataError where there are none."""
    files = list[Path]()
    for inner in sorted({file.parent for file in folder.rglob("*") if file.is_file()}):
        try:
            files += _files_in(inner)
        except DataError:
            continue  # a folder of other things
    if not files:
        raise DataError(f"{path} holds no log", f"it holds {some_of(others)}")
    return files


def _read(path: Path, names: FigureNames, metric: str, on_progress: Callable[[int], None]) -> Contents:
    """By its first bytes and its name. Raises DataError where it is nothing that can be read here."""
    head = head_of(path)
    if head.startswith(MAGIC) or path.suffix == ".wandb":
        return read_offline(path, names)
    if is_event_file(path, head):
        return read_event_file(path, names)
    if path.suffix == ".csv":
        return read_csv(path, names, metric)
    if path.name in OF_OURS or head.lstrip()[:1] == b"{":
        contents = read_events(path) if b'"event"' in head else read_metrics(path, names)
        if path.name in OF_OURS or len(contents.steps) or contents.log_events:
            return contents
        hint = "give a log of plain lines, a run's metrics.jsonl or events.jsonl, or a WandB export (.csv)"
        raise DataError(f"{path} is JSON without a step (global_step) or an event of a run", hint)
    if head.count(b"\0") > len(head) // 1000:
        raise DataError(f"{path} is no text", "give a log, a WandB export (.csv), a .wandb or a TensorBoard file")
    return read_log(path, names, on_progress)


# ── joining ──


def _joined(found: Sequence[Contents]) -> Contents:
    read, shown = on_one_clock(found)
    used = _used_for_steps(read)
    steps, origins = Steps(), list[int]()
    for contents in used:
        steps.extend(contents.steps)
        origins += [next(i for i, one in enumerate(read) if one is contents)] * len(contents.steps)
    unused = "its steps are not used: another file has as many or more"
    sources = [
        replace(one.sources[0], note="; ".join(filter(None, (unused, one.sources[0].note))))
        if len(one.steps) and one not in used
        else one.sources[0]
        for one in read
    ]
    has_own = any(source.what.endswith(" events") for source in sources)
    copies = [c for c in read if len(c.steps) and c not in used] if any(_is_log(c) for c in used) else []
    events = [
        event
        for one in read
        for event in one.log_events
        if not (has_own and _is_log(one) and event.kind in STARTS) and not (one in copies and event.kind in FAILED)
    ]
    told = _of_the_run(_each_kill_once(events), sources)
    placed = (event for event in _placed(told, steps) if not _is_first_start(event))
    return Contents(
        steps=steps,
        origins=tuple(origins),
        log_events=tuple(sorted(placed, key=lambda event: (event.time is None, event.time or 0.0))),
        sources=tuple(sources),
        keys=tuple(sorted({key for contents in read for key in contents.keys})),
        total_steps=max((contents.total_steps for contents in read), default=0),
        shown=shown,
    )


def _used_for_steps(read: Sequence[Contents]) -> list[Contents]:
    """The one with the most steps; where that is a log, with it the logs that came before and after it. So are
    TensorBoard's files, of which each start makes one."""
    with_steps = sorted((contents for contents in read if len(contents.steps)), key=_begin)
    longest = max(with_steps, key=lambda contents: len(contents.steps), default=None)
    used, end = list[Contents](), float("-inf")
    for contents in with_steps:
        follows = longest is not None and _joins(longest, contents) and _begin(contents) >= end - 1
        if contents is longest or (follows and longest is not None and not _overlap(contents, longest)):
            used.append(contents)
            end = contents.sources[0].last_time or end
    return used


def _joins(one: Contents, other: Contents) -> bool:
    what = one.sources[0].what
    return what == other.sources[0].what and (_is_log(one) or what == TENSORBOARD)


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


def _each_kill_once(events: Sequence[LogEvent]) -> list[LogEvent]:
    """A kernel writes several lines of one kill, and a launcher others: of a process the one that says why is kept,
    with the role that either of them shows."""
    kept, last = [event for event in events if event.kind not in KILLS], dict[object, LogEvent]()
    for event in sorted((event for event in events if event.kind in KILLS), key=lambda event: event.time or 0.0):
        pid = event.facts.get("pid")
        before = last.get(pid)
        if pid is None or before is None or abs((event.time or 0.0) - (before.time or 0.0)) > ONE_KILL_S:
            kept.append(event)
        else:
            best, other = (before, event) if before.kind is not Kind.KILLED else (event, before)
            role = other.role if best.role is Role.UNKNOWN and other.kind is Kind.KILLED else best.role
            step = other.after_step if best.after_step is None else best.after_step
            kept.remove(before)
            kept.append(event := replace(best, role=role, after_step=step))
        last[pid] = event
    return kept


def _of_the_run(events: Iterable[LogEvent], sources: Sequence[Source]) -> Iterator[LogEvent]:
    """What the kernel killed when no log of the run was written is none of its processes."""
    times = [
        time
        for source in sources
        if source.role is not Role.KERNEL
        for time in (source.first_time, source.last_time)
        if time is not None
    ]
    for event in events:
        is_outside = times and event.time is not None and not min(times) <= event.time <= max(times) + ONE_KILL_S
        is_other = is_outside and event.kind is Kind.KILLED_FOR_MEMORY
        yield replace(event, kind=Kind.OTHER_KILLED) if is_other else event
