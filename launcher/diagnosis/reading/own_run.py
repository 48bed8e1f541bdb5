"""What our own runs write down: metrics.jsonl for the steps, events.jsonl for what happened (docs/files.md)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.diagnosis.reading.log_clock import from_unix
from launcher.diagnosis.reading.log_records import Contents, FigureNames, Kind, LogEvent, Role, Source, Steps
from launcher.reporting.event_lines import tell
from launcher.run_files.journal import number_of, read_lines

Line = Mapping[str, object]

KINDS: Mapping[str, Kind] = {
    "incident.began": Kind.INCIDENT,
    "server.died": Kind.SERVER_EXITED,
    "server.ready": Kind.SERVER_READY,
    "memory.ran_out": Kind.OUT_OF_MEMORY,
    "checkpoint.committed": Kind.CHECKPOINT,
    "checkpoint.condemned": Kind.CONDEMNED,
    "trainer.restored": Kind.RESUMED,
    "trainer.died": Kind.TRAINER_FAILED,
    "batch.rejected": Kind.BATCH_REJECTED,
    "run.finished": Kind.RUN_ENDED,
    "run.errored": Kind.RUN_ENDED,
    "run.aborted": Kind.RUN_ENDED,
}
HEAD = ("global_step", "time", "epoch", "epoch_step", "attempt", "policy_version")


def read_metrics(path: Path, names: FigureNames) -> Contents:
    """The steps of a metrics.jsonl, in the order written."""
    steps, keys = Steps(), set[str]()
    for line in read_lines(path):
        step = line.get("global_step")
        if not isinstance(step, int):
            continue
        values = {key: number_of(value) for key, value in line.items() if key not in HEAD}
        keys.update(values)
        steps.append(step, _time(line), names.pick(values))
    times = steps.times
    source = Source(
        path=str(path),
        what="metrics of a run of this launcher",
        role=Role.TRAINER,
        bytes=path.stat().st_size,
        steps=len(steps),
        first_time=float(times[0]) if len(times) else None,
        last_time=float(times[-1]) if len(times) else None,
    )
    return Contents(steps=steps, log_events=(), sources=(source,), keys=tuple(sorted(keys)))


def read_events(path: Path, steps: Steps) -> Contents:
    """What events.jsonl tells, placed between the steps by its time."""
    times = [time for time in steps.times if math.isfinite(time)]
    numbers = [int(step) for step, time in zip(steps.steps, steps.times, strict=True) if math.isfinite(time)]
    log_events, count = [], 0
    for line in read_lines(path):
        count += 1
        kind = KINDS.get(str(line.get("event")))
        if kind is Kind.RESUMED and line.get("global_step") == -1 and _step_before(times, numbers, _time(line)) is None:
            continue  # a run's beginning: its first weights, and no step to go back from
        if kind is not None:
            log_events.append(_log_event(kind, line, path, lambda time: _step_before(times, numbers, time)))
        elif line.get("event") == "run.started" and _is_later(line):
            log_events.append(_log_event(Kind.RECOVER_RUN, line, path, lambda time: _step_before(times, numbers, time)))
    source = Source(path=str(path), what=f"{count} events", role=Role.UNKNOWN, bytes=path.stat().st_size)
    return Contents(steps=Steps(), log_events=tuple(log_events), sources=(source,))


def _log_event(kind: Kind, line: Line, path: Path, step_before: Callable[[float | None], int | None]) -> LogEvent:
    time = _time(line)
    return LogEvent(
        kind=kind,
        role=Role.SERVER if str(line.get("subject", "")).startswith("server") else Role.TRAINER,
        time=time,
        last_time=time,
        after_step=step_before(time),
        text=tell(line) or " ".join(f"{line.get('event')} {line.get('subject')} {line.get('reason') or ''}".split()),
        where=path.name,
        facts={key: value for key, value in line.items() if key not in ("monotonic", "time")},
    )


def _step_before(times: list[float], numbers: list[int], time: float | None) -> int | None:
    if time is None:
        return None
    at = bisect.bisect_right(times, time)
    return numbers[at - 1] if at else None


def _is_later(line: Line) -> bool:
    attempt = line.get("attempt")
    return isinstance(attempt, int) and attempt > 1


def _time(line: Line) -> float | None:
    time = line.get("time")
    return from_unix(float(time)) if isinstance(time, int | float) else None
