"""Linux processes read from /proc: their children, open files and state; signals that can't hit a reused pid.

A process is identified by its pid *and* its start time, and signals go through a pidfd that was checked after opening.
Standard library only: a process host runs with `python -S`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LONGEST_STAT = 4096
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PF_EXITING = 0x4  # linux/sched.h


@dataclass(frozen=True, slots=True)
class Process:
    """One process, distinct from a later one of the same pid. `started` is in clock ticks since boot."""

    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> Process:
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started))


def identify(pid: int) -> Process | None:
    """The process that has `pid` now; None where there is none, or only a zombie.

    A process whose first thread has ended before the others is shown as a zombie too, but holds its files and ports:
    that one counts as alive.
    """
    fields = stat_fields(pid)
    if fields is None or (fields[0] in "ZX" and int(fields[17]) <= 1):
        return None
    return Process(pid, int(fields[19]))


def process_of(child: int) -> Process:
    """A child of this process that it has not collected, and that may have ended."""
    fields = stat_fields(child)
    assert fields is not None
    return Process(child, int(fields[19]))


def stat_fields(pid: int) -> list[str] | None:
    """Fields 3 and following of /proc/PID/stat, proc(5); the name before them may itself hold blanks and brackets."""
    try:
        descriptor = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a Path takes four times as long
        try:
            line = os.read(descriptor, LONGEST_STAT)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return line.decode(errors="replace").rpartition(")")[2].split()


def name(process: Process) -> str:
    """At most 15 characters, as the kernel keeps them; empty once the process is gone."""
    try:
        return (PROC / str(process.pid) / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_line(process: Process) -> list[str]:
    """Its words; none once the process is gone."""
    try:
        text = (PROC / str(process.pid) / "cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.removesuffix("\0").split("\0") if text else []  # a title that was written over it may have no end


def started_at(process: Process) -> float:
    """Unix seconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.started / TICKS_PER_S


def dying_with(pid: int) -> int | None:
    """The exit code of a process of ours that is ending, negative for a signal.

    None where it isn't known: it runs, is gone, or ends with 0, which a running one shows too.
    """
    fields = stat_fields(pid)
    status = int(fields[49]) if fields is not None else 0
    return os.waitstatus_to_exitcode(status) if status else None


def children(pid: int) -> list[Process]:
    """The living children of `pid`. Each thread has its own; the kernel needs CONFIG_PROC_CHILDREN."""
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # this thread has, and others have children
                pids += map(int, (task / "children").read_text().split())
    return [child for child in map(identify, pids) if child is not None]


def descendants(pid: int) -> list[Process]:
    """Children, their children, and so on. Complete for a child subreaper, which adopts orphans."""
    found: dict[int, Process] = {}
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            if child.pid not in found:
                found[child.pid] = child
                waiting.append(child.pid)
    return list(found.values())


def bearing(mark: str) -> list[Process]:
    """Processes that were started with the environment variable `mark` ("NAME=value").

    Not all: a process that changes its title overwrites the memory that shows its environment.
    """
    found = []
    for entry in PROC.iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(identify(int(entry.name)))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone, or another user's
    return [process for process in found if process is not None]


def members_of_group(leader: int) -> list[Process]:
    """Live processes of the process group that `leader` leads, without it; none where it leads none."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit() and entry.name != str(leader)]
    members = [pid for pid in pids if (fields := stat_fields(pid)) is not None and int(fields[2]) == leader]
    return [process for pid in members if (process := identify(pid)) is not None]


def open_files(pid: int, prefix: str) -> Iterator[Path]:
    """Files that the process holds open whose paths begin with `prefix`."""
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError)  # or another user's
    with gone:
        for entry in (PROC / str(pid) / "fd").iterdir():
            with gone:  # that file alone was closed meanwhile
                if str(target := entry.readlink()).startswith(prefix):
                    yield target


def errors_file(pid: int) -> Path | None:
    """The file that a live process prints its errors to; None where that is no file."""
    with contextlib.suppress(OSError):
        path = (PROC / str(pid) / "fd" / "2").readlink()
        return path if path.is_file() else None
    return None


def files_with(prefix: str) -> set[Path]:
    path = Path(prefix)
    return set(path.parent.glob(f"{path.name}*"))


def remove_unheld(files: Iterable[Path], prefix: str) -> None:
    """Those of a tree that has ended, which begin with `prefix`, but not what a process that this one can see holds
    open. Where a container or another user holds one too, that is not seen."""
    if files := set(files):
        seen = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
        for file in files.difference(*(open_files(pid, prefix) for pid in seen)):
            file.unlink(missing_ok=True)


def open_pidfd(process: Process) -> int | None:
    """A descriptor that is readable once all threads of the process have ended, zombie or not; None if it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    fields = stat_fields(process.pid)
    if fields is not None and int(fields[19]) == process.started:
        return descriptor
    os.close(descriptor)
    return None


class DeathWatch:
    """Of one process: `ended` is a pidfd. It is silent until the kernel has freed the memory, which takes 0.15 s for a
    gigabyte; the state of the first thread says before that that it dies."""

    def __init__(self, process: Process) -> None:
        """Raises OSError where it is gone."""
        self.process = process
        self.title = name(process)
        self._stat = os.open(f"{PROC}/{process.pid}/task/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        ended = open_pidfd(process)
        if ended is None:
            os.close(self._stat)
            raise ProcessLookupError(process.pid)
        self.ended = ended

    def is_dying(self) -> bool:
        """Or gone. Read 40 times a second, from an open file: that takes a tenth of what opening it anew takes."""
        try:
            line = os.pread(self._stat, LONGEST_STAT, 0)
        except ProcessLookupError:
            return True
        return bool(int(line.rpartition(b")")[2].split(None, 7)[6]) & PF_EXITING)

    def close(self) -> None:
        for descriptor in (self._stat, self.ended):
            os.close(descriptor)


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it has ended."""
    descriptor = open_pidfd(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_ended(processes: Iterable[Process], timeout_s: float) -> bool:
    """True once all have ended, False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        descriptor = open_pidfd(process)
        if descriptor is None:
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(descriptor)
    return True


def end_all(within_s: float) -> list[Process]:
    """SIGKILL everything below this process until nothing is there; returns what would not die in time."""
    deadline = time.monotonic() + within_s
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        wait_ended(left, timeout_s=1.0)
    reap()
    return left


def reap() -> dict[int, int]:
    """Collect the ended children, own and adopted, so that none stays as a zombie; their wait statuses by pid."""
    collected = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            collected[ended[0]] = ended[1]
    return collected


def process_state(pid: int) -> tuple[str | None, float]:
    """State letter and CPU seconds, (None, 0) where it can't be seen."""
    try:
        fields = stat_fields(pid)
    except OSError:
        fields = None
    return (None, 0.0) if fields is None else (fields[0], cpu_seconds(fields))


def cpu_seconds(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
