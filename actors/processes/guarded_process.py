"""A child process under the guard (`process_guard.py`), as its owner sees it on an asyncio loop.

It reads the guard's report and waits for the child's end, then for the end of everything below it. The guard reports
within milliseconds; where it was killed, its pipe closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.processes.process_guard import TOLD
from actors.processes.process_tree import bearing, identify, send, wait_ended
from launcher.base.errors import ServerError

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLaunch:
    """What to run, and what ends with it.

    The child ends with any of the processes `watch`. `vital`: prefix of the names of those of its children without
    which it is useless. `mark` ("NAME=value") is set in its environment; processes of an earlier incarnation that
    still have it are ended before the start. After the end, the folder `scratch` is removed, and so are files made
    meanwhile whose paths begin with `files` and that nobody holds open.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    mark: str
    watch: Sequence[int]
    grace_s: float
    vital: str = ""
    files: str = ""
    scratch: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the child ended. `exit_code` is negative for a signal, None where it is unknown."""

    exit_code: int | None
    cause: str  # empty: by itself
    monotonic: float
    time: float

    @property
    def was_told(self) -> bool:
        return self.cause == TOLD


class GuardedProcess:
    """One incarnation of a child. Made by `launch`."""

    def __init__(self, *, pid: int, guard_pid: int, sentinel_pid: int, lines: asyncio.StreamReader) -> None:
        self.pid = pid
        self.guard_pid = guard_pid
        self.sentinel_pid = sentinel_pid
        self._guard = identify(guard_pid)
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen(lines))

    @classmethod
    async def launch(cls, launch: ProcessLaunch) -> GuardedProcess:
        """Start the child under its guard. Raises ServerError where it can't be started."""
        await asyncio.to_thread(_end_bearing, launch.mark)
        readable, writable = os.pipe()
        try:
            launcher = await asyncio.create_subprocess_exec(
                *_guard_command(launch, writable),
                env=_environment(launch),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(writable,),
            )
        finally:
            os.close(writable)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(readable, "rb", buffering=0)
        )
        await launcher.wait()
        try:
            first = await asyncio.wait_for(lines.readline(), LAUNCH_TIMEOUT_S)
        except TimeoutError as error:
            raise ServerError(
                f"the server's guard did not start within {LAUNCH_TIMEOUT_S:g} s", "the machine is overloaded"
            ) from error
        told = json.loads(first or "{}")
        if told.get("event") != "started":
            why = told.get("reason", "its guard ended at once")
            raise ServerError(f"the server process could not be started: {why}", f"see {launch.log}")
        return cls(pid=told["server"], guard_pid=told["guard"], sentinel_pid=told["sentinel"], lines=lines)

    @property
    def ended(self) -> Ended | None:
        return self._ended.result() if self._ended.done() else None

    async def wait_ended(self) -> Ended:
        """Until the child itself has ended; its own children may outlive it by moments."""
        return await asyncio.shield(self._ended)

    async def wait_swept(self) -> list[int]:
        """Until nothing is left of the child, its children and its files. Returns the pids that survived SIGKILL."""
        return await asyncio.shield(self._listening)

    async def end(self) -> list[int]:
        """End the child and everything below it, and wait for that. Harmless when it has ended."""
        if self._guard is not None:
            send(self._guard, signal.SIGTERM)
        return await self.wait_swept()

    async def _listen(self, lines: asyncio.StreamReader) -> list[int]:
        left: list[int] = []
        while line := await lines.readline():
            told = json.loads(line)
            if told["event"] == "ended":
                self._settle(told["exit_code"], told["cause"], told["monotonic"], told["time"])
            elif told["event"] == "swept":
                left = told["left"]
                if not self._ended.done():
                    self._settle(None, f"its guard (pid {self.guard_pid}) was killed", told["monotonic"], told["time"])
        if not self._ended.done():
            self._settle(None, "its guard and sentinel were killed", time.monotonic(), time.time())
        return left

    def _settle(self, exit_code: int | None, cause: str, monotonic: float, wall: float) -> None:
        self._ended.set_result(Ended(exit_code=exit_code, cause=cause, monotonic=monotonic, time=wall))


def _guard_command(launch: ProcessLaunch, report: int) -> list[str]:
    options: dict[str, object] = {
        "--report": report,
        "--log": launch.log,
        "--mark": launch.mark,
        "--grace-s": launch.grace_s,
        "--vital": launch.vital,
        "--files": launch.files,
    }
    if launch.scratch is not None:
        options["--scratch"] = launch.scratch
    watched = [process for process in map(identify, launch.watch) if process is not None]
    if len(watched) < len(launch.watch):
        raise ServerError("the server belongs to a process that is gone", "its actor was being ended")
    words = [word for name, value in options.items() for word in (name, str(value))]
    words += [word for process in watched for word in ("--watch", str(process))]
    return [sys.executable, "-S", "-m", "actors.processes.process_guard", *words, "--", *launch.command]


def _environment(launch: ProcessLaunch) -> dict[str, str]:
    """The guard imports `actors` from where it was imported here, whatever the working folder."""
    path = [str(ROOT), *filter(None, [launch.environment.get("PYTHONPATH")])]
    return {**launch.environment, "PYTHONPATH": os.pathsep.join(path)}


def _end_bearing(mark: str) -> None:
    """An earlier incarnation whose guard and sentinel were both killed may have left a daemon behind."""
    left = [process for process in bearing(mark) if send(process, signal.SIGKILL)]
    if not wait_ended(left, timeout_s=10.0):
        raise ServerError(
            f"an earlier incarnation of this server does not end: pids {[process.pid for process in left]}",
            "a process that survives SIGKILL waits in the kernel; the machine may need a restart",
        )
