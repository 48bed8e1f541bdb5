"""Reads what our own runs write: metrics.jsonl for the steps, events.jsonl for the events (docs/files.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from launcher.base.wording import lines_not_read
from launcher.diagnosis.reading.log_records import Contents, FigureNames, Kind, LogEvent, Role, Source, Steps
from launcher.reporting.event_lines import tell
from launcher.run_files.journal import Lines, number_of, read_lines
from launcher.run_log.file_follower import unreadable
from launcher.run_log.line_values import as_float, without_endless_integers
from launcher.run_log.run_log import RunLog

KINDS: Mapping[str, Kind] = {
    "incident.began": Kind.INCIDENT,
    "server.died": Kind.SERVER_EXITED,
    "server.ready": Kind.SERVER_READY,
    "server.promoted": Kind.SERVER_READY,  # in files of before all servers served: a standby took over
    "memory.ran_out": Kind.OUT_OF_MEMORY,
    "checkpoint.committed": Kind.CHECKPOINT,
    "checkpoint.condemned": Kind.CONDEMNED,
    "trainer.restored": Kind.RESUMED,
    "run.hold_asked": Kind.HELD,
    "run.hold_released": Kind.RELEASED,
    "trainer.died": Kind.TRAINER_FAILED,
    "batch.rejected": Kind.BATCH_REJECTED,
    "run.finished": Kind.RUN_ENDED,
    "run.errored": Kind.RUN_ENDED,
    "run.aborted": Kind.RUN_ENDED,
}
HEAD = ("global_step", "time", "epoch", "epoch_step", "attempt", "policy_version", "lineage")


def read_metrics(path: Path, names: FigureNames) -> Contents:
    """The steps of a metrics.jsonl, in the order written. What was undone is known from the journal beside it."""
    steps, keys, log, foreign = Steps(), set[str](), RunLog(), 0
    lines = read_lines(path)
    for line in lines:
        if not log.take_step(line):
            foreign += 1
            continue
        values = {key: number_of(value) for key, value in line.items() if key not in HEAD}
        keys.update(values)
        steps.append(log.steps[-1].step, _time(line), names.pick(values))
    journal = path.with_name("events.jsonl")
    for event in () if unreadable(journal) else read_lines(journal):
        log.take_event(event)
    steps.backs = tuple(log.stepped_back())
    times = steps.times.tolist()
    source = Source(
        path=str(path),
        what="metrics of a run of this launcher",
        role=Role.TRAINER,
        bytes=path.stat().st_size,
        steps=len(steps),
        first_time=times[0] if times else None,
        last_time=times[-1] if times else None,
        skipped=_not_read(lines, foreign),
    )
    return Contents(steps=steps, sources=(source,), keys=tuple(sorted(keys)))


def read_events(path: Path) -> Contents:
    """The events of an events.jsonl that matter here."""
    file, log = read_lines(path), RunLog()
    lines = [without_endless_integers(line) for line in file]
    events = tuple(_log_event(kind, line, path) for line in lines if (kind := _kind_of(line)) is not None)
    size, what = path.stat().st_size, f"{len(lines)} events"
    foreign = sum(not log.take_event(line) for line in lines)
    source = Source(path=str(path), what=what, role=Role.UNKNOWN, bytes=size, skipped=_not_read(file, foreign))
    return Contents(log_events=events, sources=(source,), utc_offsets=log.utc_offsets())


def _not_read(file: Lines, foreign: int) -> str:
    return lines_not_read(file.skipped + foreign, file.path, file.first_skipped)


def _kind_of(line: Mapping[str, object]) -> Kind | None:
    attempt = line.get("attempt")
    if line.get("event") == "run.started" and isinstance(attempt, int) and attempt > 1:
        return Kind.RECOVER_RUN
    return KINDS.get(str(line.get("event")))


def _log_event(kind: Kind, line: Mapping[str, object], path: Path) -> LogEvent:
    time = _time(line)
    return LogEvent(
        kind=kind,
        role=Role.SERVER if str(line.get("subject", "")).startswith("server") else Role.TRAINER,
        time=time,
        last_time=time,
        text=tell(line) or " ".join(f"{line.get('event')} {line.get('subject')} {line.get('reason') or ''}".split()),
        where=path.name,
        facts={key: value for key, value in line.items() if key not in ("monotonic", "time")},
    )


def _time(line: Mapping[str, object]) -> float | None:
    time = as_float(line.get("time"))
    return time if math.isfinite(time) else None
