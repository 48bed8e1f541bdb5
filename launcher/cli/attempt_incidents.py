"""The incident of an attempt that takes another one's place: its cluster was lost, it halted, or its driver was killed.

The attempt that follows begins the incident, its Coordinator ends it. Where none can follow, the run's end ends it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from launcher.base.errors import StorageError
from launcher.base.messages import Cause
from launcher.policy.incident_policy import CLUSTER, DRIVER, RUN
from launcher.policy.next_attempt import BeginAgain
from launcher.run_files.journal import Journal, Record, read_lines
from launcher.run_files.run_memory import OF_A_COMMAND, MemoryFile, RunMemory, keep_command_event, memory_file
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_integer
from launcher.run_log.run_log import RunLog

BEGUN: Mapping[Cause, tuple[str, str, str]] = {
    Cause.CLUSTER_LOST: (CLUSTER, "cluster.restarted", "a new local cluster runs"),
    Cause.RUN_HALTED: (RUN, "attempt.begun_anew", "a new attempt runs"),
    Cause.DRIVER_LOST: (DRIVER, "driver.restarted", "a new driver runs"),
}
"""Whose incident it is, and the event that the repair is done, with its reason."""


def begin_memory(paths: RunPaths, attempt: int, *, has_command: bool = False) -> str:
    """For the Coordinator of an attempt; returns what must be said of it, "" where nothing. Raises StorageError,
    JournalError."""
    file, log = memory_file(paths), RunLog()
    of_a_command: list[dict[str, Any]] = []
    for line in read_lines(paths.events):  # one after the other: a week has more of them than a driver should hold
        if log.take_event(line) and has_command and line["event"] in OF_A_COMMAND:
            keep_command_event(of_a_command, line)
    try:
        why = file.begin(attempt, last_incident=log.last_incident, of_a_command=of_a_command if has_command else None)
    except OSError as error:
        raise _unwritable(file, error) from error
    return why and f"{why}; a new one is begun, and incidents that an earlier attempt left open stay open"


def begin_incident(journal: Journal, paths: RunPaths, before: BeginAgain) -> Record:
    """Returns its event. Raises RunError, StorageError."""
    file = memory_file(paths)
    memory = file.read(journal.attempt)
    subject, _, _ = BEGUN[before.cause]
    number = memory.incidents.number_to_begin(subject)
    facts: dict[str, Any] = {
        "incident": number,
        "cause": before.cause,
        "onset_step": None,
        "doing": before.doing,
        "at": before.began,
    }
    began = journal.record("incident.began", subject=subject, reason=before.reason, **facts)
    memory.incidents.begin(number, before.cause, subject, before.began)
    memory.incidents.keep(number, began)
    _write(file, memory)
    return began


def number_of_incident(began: Record) -> int:
    number = began["incident"]
    assert isinstance(number, int), "as begin_incident has written it"
    return number


def record_begun(journal: Journal, paths: RunPaths, before: BeginAgain, incident: int) -> None:
    """Its cluster runs. `global_step`: the last that was committed, which the restored one is compared with. Raises
    RunError, StorageError."""
    subject, event, reason = BEGUN[before.cause]
    more = {"times": before.times} if before.cause is Cause.DRIVER_LOST else {}
    seconds, step = time.monotonic() - before.began, last_committed(paths)
    begun = journal.record(
        event, subject=subject, reason=reason, incident=incident, global_step=step, seconds=seconds, **more
    )
    file = memory_file(paths)
    memory = file.read(journal.attempt)
    memory.incidents.keep(incident, begun)
    _write(file, memory)


def end_incidents(journal: Journal, paths: RunPaths, reason: str) -> None:
    """Whatever an attempt in whose place no other can begin has left open. Raises StorageError."""
    file = memory_file(paths)
    if (memory := file.last()) is None:
        return
    now, open_ = time.monotonic(), dict(memory.incidents.open)
    for number, one in [*memory.incidents.left_open.items(), *open_.items()]:
        seconds = max(0.0, now - one.since) if number in open_ else None  # on an earlier attempt's clock: not known
        facts: dict[str, Any] = {"cause": one.cause, "seconds": seconds, "is_mended": False}
        journal.record("incident.ended", subject=one.subject, reason=reason, incident=number, **facts)
        memory.incidents.end(number)
    _write(file, memory)


def _write(file: MemoryFile, memory: RunMemory) -> None:
    try:
        file.write(memory)
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: MemoryFile, error: OSError) -> StorageError:
    what = f"{file.path} can't be written: {error.strerror or error}"
    return StorageError(what, "make room on its disk, or check its permissions")


def last_committed(paths: RunPaths) -> int | None:
    """The step of the ledger's last line."""
    return as_integer(last_line(paths).get("global_step"))


def last_line(paths: RunPaths) -> Record:
    """Of the ledger, which no restore takes back, that of the step committed last; an empty one where there is none."""
    lines = (line for line in read_lines(paths.ledger) if as_integer(line.get("global_step")) is not None)
    return next(iter(deque(lines, maxlen=1)), {})
