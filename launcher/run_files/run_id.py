"""What tells a run from others at the same path: containers that share a machine's processes, or its memory, may each
have one there."""

from __future__ import annotations

import contextlib
from pathlib import Path

RUN_ID = ".run_id"


def read_run_id(logs: Path) -> str:
    """Of the run with these logs; "" for a run of before, which has none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return (logs / RUN_ID).read_text().strip()
    return ""


def mark_in(logs: Path, variable: str, value: object) -> str:
    """An environment variable ("NAME=value") by which the run's processes are found, and no other run's."""
    own = ""
    with contextlib.suppress(OSError):  # a start must not fail for it: others are still told apart by the path
        own = read_run_id(logs)
    return f"{variable}={value}#{own}" if own else f"{variable}={value}"
