"""Signals to verified processes, each with evidence that it worked."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from actors.processes.process_tree import Process, send, wait_ended
from launcher.base.errors import RunError
from scripts.run_processes import state

ENDS_WITHIN_S = 10.0
STOPS_WITHIN_S = 5.0
LOOK_S = 0.001


class Missed(RunError):
    """The fault could not be injected; nothing of it is left behind."""


def kill(processes: Sequence[Process]) -> dict[str, Any]:
    """SIGKILL all, and wait for their ends; whom it reached, and when. Raises Missed where that was none."""
    at = time.monotonic()
    # The youngest first: a child that dies with its parent (PR_SET_PDEATHSIG) would be gone before its own signal.
    reached = {process for process in reversed(processes) if send(process, signal.SIGKILL)}
    hit = [process for process in processes if process in reached]
    if not hit:
        raise Missed("the processes meant had ended before the signal", "try again")
    if not wait_ended(hit, ENDS_WITHIN_S):
        raise Missed(f"SIGKILL did not end all of {[p.pid for p in hit]} within {ENDS_WITHIN_S:g} s", "a kernel hang")
    return {"pids": [process.pid for process in hit], "signalled_monotonic": at}


def stop(processes: Sequence[Process]) -> list[int]:
    """SIGSTOP all, until every one is stopped; their pids. Raises Missed."""
    hit = [process for process in processes if send(process, signal.SIGSTOP)]
    if not hit:
        raise Missed("the processes meant had ended before the signal", "try again")
    deadline = time.monotonic() + STOPS_WITHIN_S
    while any(state(process) not in {"T", "t", ""} for process in hit):
        if time.monotonic() > deadline:
            resume(hit)
            raise Missed(f"SIGSTOP did not stop all of {[p.pid for p in hit]}", "try again")
        time.sleep(LOOK_S)
    return [process.pid for process in hit]


def resume(processes: Sequence[Process]) -> None:
    for process in processes:
        send(process, signal.SIGCONT)


@contextlib.contextmanager
def stopped(processes: Sequence[Process]) -> Iterator[list[int]]:
    """They are stopped within the block and resume after it, whatever ends it."""
    try:
        yield stop(processes)
    finally:
        resume(processes)


def hold(processes: Sequence[Process], seconds: float, sleep: Callable[[float], None]) -> dict[str, Any]:
    """Stop them for so long; with 0 for good."""
    if not seconds:
        return {"pids": stop(processes)}
    with stopped(processes) as pids:
        sleep(seconds)
    return {"pids": pids, "seconds": seconds}
