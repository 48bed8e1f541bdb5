"""Signals to verified processes, each with evidence that it worked."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from actors.processes.process_tree import PROC, Process, identify, open_pidfd, send, wait_ended
from launcher.base.errors import RunError
from scripts.faults.run_processes import state

ENDS_WITHIN_S = 10.0
STOPS_WITHIN_S = 5.0
LOOK_S = 0.001


class Missed(RunError):
    """The fault could not be injected; nothing of it is left behind."""


def kill(processes: Sequence[Process]) -> dict[str, Any]:
    """SIGKILL all, and wait for their ends; whom it reached, and when. Raises Missed where that was none."""
    at = time.monotonic()
    hit = [process for process in processes if send(process, signal.SIGKILL)]
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


def duty_cycle(
    processes: Sequence[Process], *, slower: float, period_s: float, seconds: float, sleep: Callable[[float], None]
) -> int:
    """Let them run for 1/slower of each period; how often they were stopped. Ends early when they have ended."""
    deadline = time.monotonic() + seconds
    times = 0
    while time.monotonic() < deadline and all(identify(process.pid) == process for process in processes):
        with stopped(processes):
            times += 1
            sleep(period_s * (1 - 1 / slower))
        sleep(period_s / slower)
    return times


def limit_memory(process: Process, headroom_bytes: int) -> int:
    """Let its address space grow by no more than that from now on; the limit in bytes. Raises Missed."""
    descriptor = open_pidfd(process)  # held open: while it is, the pid can't become another's
    if descriptor is None:
        raise Missed(f"process {process.pid} has ended", "try again")
    try:
        limit = _address_space(process) + headroom_bytes
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, hard))
    except (ProcessLookupError, FileNotFoundError, PermissionError) as error:
        raise Missed(
            f"the memory of process {process.pid} can't be limited: {error}", "run it as the same user"
        ) from error
    return limit


def _address_space(process: Process) -> int:
    pages = int((PROC / str(process.pid) / "statm").read_text().split()[0])
    return pages * resource.getpagesize()
