"""The incident of an attempt that takes another one's place: its cluster was lost, it halted, or its driver was killed.

The attempt that follows begins the incident, its Coordinator ends it. Where none can follow, the run's end ends it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from launcher.base.messages import Cause
from launcher.policy.incident_policy import CLUSTER, DRIVER, RUN
from launcher.policy.next_attempt import BeginAgain
from launcher.run_files.journal import Journal, Record, number_of, read_lines
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_paths import RunPaths

BEGUN: Mapping[Cause, tuple[str, str, str]] = {
    Cause.CLUSTER_LOST: (CLUSTER, "cluster.restarted", "a new local cluster runs"),
    Cause.RUN_HALTED: (RUN, "attempt.begun_anew", "a new attempt runs"),
    Cause.DRIVER_LOST: (DRIVER, "driver.restarted", "a new driver runs"),
}
"""Whose incident it is, and the event that the repair is done, with its reason."""


def begin_incident(journal: Journal, paths: RunPaths, before: BeginAgain) -> Record:
    """Returns its event."""
    known = (event.get("incident") for event in read_lines(paths.events))
    facts: dict[str, Any] = {
        "incident": 1 + max((one for one in known if isinstance(one, int)), default=0),
        "cause": before.cause,
        "onset_step": None,
        "doing": before.doing,
        "at": before.began,
    }
    subject, _, _ = BEGUN[before.cause]
    return journal.record("incident.began", subject=subject, reason=before.reason, **facts)


def number_of_incident(began: Record) -> int:
    number = began["incident"]
    assert isinstance(number, int), "as begin_incident has written it"
    return number


def record_begun(journal: Journal, paths: RunPaths, before: BeginAgain, incident: int) -> None:
    """Its cluster runs. `global_step`: the last that was committed, which the restored one is compared with."""
    subject, event, reason = BEGUN[before.cause]
    more = {"times": before.times} if before.cause is Cause.DRIVER_LOST else {}
    seconds, step = time.monotonic() - before.began, last_committed(paths)
    journal.record(event, subject=subject, reason=reason, incident=incident, global_step=step, seconds=seconds, **more)


def end_incidents(journal: Journal, paths: RunPaths, reason: str) -> None:
    """Whatever an attempt in whose place no other can begin has left open."""
    left: dict[int, Record] = {}
    for event in read_lines(paths.events):
        number = event.get("incident")
        if event.get("event") in ENDS:
            left.clear()
        elif event.get("event") == "incident.began" and isinstance(number, int):
            left[number] = event
        elif event.get("event") == "incident.ended" and isinstance(number, int):
            left.pop(number, None)
    now = time.monotonic()
    for number, began in left.items():
        facts: dict[str, Any] = {
            "cause": began.get("cause"),
            "seconds": max(0.0, now - number_of(began.get("at"), now)),
            "is_mended": False,
        }
        subject = str(began.get("subject") or RUN)
        journal.record("incident.ended", subject=subject, reason=reason, incident=number, **facts)


def last_committed(paths: RunPaths) -> int | None:
    """The step of the ledger's last line."""
    step = last_line(paths).get("global_step")
    return step if isinstance(step, int) else None


def last_line(paths: RunPaths) -> Record:
    """Of the ledger; an empty one where there is none."""
    return next(iter(deque(read_lines(paths.ledger), maxlen=1)), {})
