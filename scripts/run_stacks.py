"""What each process of a live run is doing: its Python stack, by py-spy, without stopping it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from launcher.base.errors import ResourceError, UsageError
from launcher.reporting.current_status import CurrentStatus

RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
DUMP_TIMEOUT_S = 10.0
"""py-spy takes well under a second; on a process that sleeps in the kernel it may wait for ever."""


def stacks(now: CurrentStatus) -> Iterator[str]:
    """A heading and a stack for each process of the run that is on this machine: driver, trainer ranks, servers,
    supervisors. Raises UsageError where the driver runs elsewhere, ResourceError where py-spy is missing."""
    if now.host != socket.gethostname():
        raise UsageError(f"the run's driver is on {now.host}, and stacks are read on the same machine", "run it there")
    command = py_spy()
    for process in _processes(now):
        yield f"── {_title(process)} (pid {process.pid}) ──"
        yield _dump(command, process.pid)


def py_spy() -> str:
    """Its path. Raises ResourceError where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise ResourceError("py-spy is not installed", "it is among this project's dependencies: install them")
    return found


def _processes(now: CurrentStatus) -> list[psutil.Process]:
    """The driver's tree, less what is Ray's own; the trainer also where Ray was there before the run."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        driver = psutil.Process(now.pid)
        found = {process.pid: process for process in driver.children(recursive=True) if _is_ours(process)}
        found = {driver.pid: driver, **found}
    if now.status is not None and now.status.pid not in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[now.status.pid] = psutil.Process(now.status.pid)
    return list(found.values())


def _is_ours(process: psutil.Process) -> bool:
    title = _title(process)
    return title.startswith(("ray::", "sglang::")) and not title.startswith(RAYS_OWN)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100] or process.name()
    except psutil.Error:  # it ended meanwhile, or is another user's
        return ""


def _dump(program: str, pid: int) -> str:
    """The stack; what py-spy said where it could not read one."""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {DUMP_TIMEOUT_S:g} s"
    if done.returncode:
        return f"no stack: {done.stderr.strip()} (py-spy must run as root, or be allowed to trace other processes)"
    return done.stdout.strip()
