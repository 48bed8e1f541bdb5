"""Reads from a run's events how its attempts began and ended."""

from __future__ import annotations

from launcher.base.messages import TerminalStatus
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths

STARTED = "run.started"
ENDS = {f"run.{status.lower()}": status for status in TerminalStatus}
GONE = (
    "its driver is gone and recorded no final status; python -m scripts.resume_training shows the command that "
    "resumes it here"
)
"""Of a run that was copied or moved the original's own command would continue the original."""


def last_start_or_end(paths: RunPaths, *, or_event: str = STARTED) -> Record:
    """The newest event that an attempt began or ended, or an event of that name; empty where there is none."""
    last: Record = {}
    for line in read_lines(paths.events):
        if (name := str(line.get("event"))) in ENDS or name in (STARTED, or_event):
            last = line
    return last


def last_end(paths: RunPaths) -> Record | None:
    """The last event of the last attempt; None where it is still running, or was cut off."""
    last = last_start_or_end(paths)
    return last if last.get("event") in ENDS else None
