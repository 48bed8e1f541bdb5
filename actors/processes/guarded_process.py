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

from actors.processes.guard_options import MODULE, with_options
from actors.processes.process_guard import TOLD
from actors.processes.process_tree import Process, bearing, identify, send, wait_ended
from launcher.base.errors import ServerError

ROOT = Path(__file__).resolve().parents[2]
MOST_AT_ONCE = 65536
LAUNCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLaunch:
    """What to run, and what ends with it.

    The child ends with any of the processes `watch`. `vital`: prefix of the names of those of its children without
    which it is useless. `mark` ("NAME=value") is set in its environment; processes of an earlier incarnation that
    still have it are ended before the start. After the end, the folder `scratch` is removed, and so are files whose
    paths begin with `files`, that the child or one below it was seen to hold open, and that nobody else is seen to
    hold. `inherit`: a descriptor that the child gets too; `frees_orphans`: what it forks and leaves is not ended with
    it.
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
    inherit: int | None = None
    frees_orphans: bool = False


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


class ReportPipe:
    """`lines` are what comes through a pipe, which is closed at its end.

    Without a transport: uvloop, which Ray's actors run on, closes the descriptor of a pipe twice, and the second time
    it may be the file that another thread has just opened.
    """

    def __init__(self, descriptor: int) -> None:
        self.lines = asyncio.StreamReader()
        self._descriptor: int | None = descriptor
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._take)

    def _take(self) -> None:
        if self._descriptor is None:
            return
        try:
            data = os.read(self._descriptor, MOST_AT_ONCE)
        except BlockingIOError:
            return
        if data:
            self.lines.feed_data(data)
        else:
            self.close()

    def close(self) -> None:
        """Once, however often it is asked."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            self.lines.feed_eof()


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
        await asyncio.to_thread(end_bearing, launch.mark)
        readable, writable = os.pipe()
        try:
            launcher = await asyncio.create_subprocess_exec(
                *with_options(guard_command(launch), {"--report": writable}),
                env=_environment(launch),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(writable, *(() if launch.inherit is None else (launch.inherit,))),
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        await launcher.wait()
        return await cls.reported(readable, launch.log, within_s=LAUNCH_TIMEOUT_S)

    @classmethod
    async def reported(cls, report: int, log: Path, *, within_s: float) -> GuardedProcess:
        """The child that a guard reports through the pipe `report`, which is closed at its end. Raises ServerError."""
        pipe = ReportPipe(report)
        try:
            async with asyncio.timeout(within_s):  # wait_for, of Python 3.11, may swallow a cancellation
                first = await pipe.lines.readline()
        except TimeoutError as error:
            pipe.close()
            raise ServerError(
                f"the server's guard did not start within {within_s:g} s", "the machine is overloaded"
            ) from error
        told = json.loads(first or "{}")
        if told.get("event") != "started":
            pipe.close()
            why = told.get("reason", "its guard ended at once")
            raise ServerError(f"the server process could not be started: {why}", f"see {log}")
        return cls(pid=told["server"], guard_pid=told["guard"], sentinel_pid=told["sentinel"], lines=pipe.lines)

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


def guard_command(launch: ProcessLaunch) -> list[str]:
    """Without `--report`. Raises ServerError where a process that it belongs to is gone."""
    options: dict[str, object] = {
        "--log": launch.log,
        "--mark": launch.mark,
        "--grace-s": launch.grace_s,
        "--vital": launch.vital,
        "--files": launch.files,
    }
    if launch.scratch is not None:
        options["--scratch"] = launch.scratch
    if launch.inherit is not None:
        options["--inherit"] = launch.inherit
    watched = [process for process in map(identify, launch.watch) if process is not None]
    if len(watched) < len(launch.watch):
        raise ServerError("the server belongs to a process that is gone", "its actor was being ended")
    words = [word for name, value in options.items() for word in (name, str(value))]
    words += [word for process in watched for word in ("--watch", str(process))]
    words += ["--frees-orphans"] if launch.frees_orphans else []
    return [sys.executable, "-S", "-m", MODULE, *words, "--", *launch.command]


def _environment(launch: ProcessLaunch) -> dict[str, str]:
    """The guard imports `actors` from where it was imported here, whatever the working folder."""
    path = [str(ROOT), *filter(None, [launch.environment.get("PYTHONPATH")])]
    return {**launch.environment, "PYTHONPATH": os.pathsep.join(path)}


def end_bearing(mark: str, *, but: Process | None = None) -> None:
    """An earlier incarnation whose guard and sentinel were both killed may have left a daemon behind. `but` lives on.
    Raises ServerError."""
    left = [process for process in bearing(mark) if process != but and send(process, signal.SIGKILL)]
    if not wait_ended(left, timeout_s=10.0):
        raise ServerError(
            f"an earlier incarnation of this server does not end: pids {[process.pid for process in left]}",
            "a process that survives SIGKILL waits in the kernel; the machine may need a restart",
        )
