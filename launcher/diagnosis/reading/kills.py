"""Of the lines about processes that were killed: one for each, and which of them can be the run's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from launcher.diagnosis.reading.log_records import KILLS, Kind, LogEvent, Role, Source

ONE_KILL_S = 600.0
"""What tells of one process within this time tells of one kill: numbers of processes are used again."""


def each_kill_once(events: Sequence[LogEvent]) -> list[LogEvent]:
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


def of_the_run(events: Iterable[LogEvent], sources: Sequence[Source]) -> Iterator[LogEvent]:
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
