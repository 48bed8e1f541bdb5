"""A process host (process_host.py) and what runs in it, as their owner sees them on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actors.processes.process_host import HOST, LONGEST_MESSAGE, ORDERS, TOLD
from actors.processes.process_tree import Process, bearing, identify, name, remove_unheld, send, wait_ended
from launcher.base.errors import ServerError

ROOT = Path(__file__).resolve().parents[2]
PLAIN = (sys.executable, "-S", "-m", "actors.processes.process_host")
"""The command of a host that imports nothing, and runs programs."""
VARIES = ("TMPDIR",)
"""Of the environment, what each fork of a host may have of its own: nothing that is read at import."""
LAUNCH_S = 60.0  # a host says within 0.1 s that it is there, on an idle machine
ANSWER_S = 15.0  # to fork takes it 0.05 s
END_S = 10.0  # to end a tree takes it 0.5 s; one that is hung is killed then, and its server with it


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLaunch:
    """What to run, and what ends with it.

    The child ends with any of the processes `watch`. `vital`: prefix of the names of those of its children without
    which it is useless. `mark` ("NAME=value") is set in its environment; processes of an earlier host that still have
    it are ended before the first start. After the end, the folder `scratch` is removed, and so are files whose paths
    begin with `files`, that the child or one below it was seen to hold open, and that nobody else is seen to hold.
    `memory_limit`: bytes of private memory for each of its processes.
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
    memory_limit: int | None = None


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


class HostedProcess:
    """One incarnation of a child. Made by `ProcessHost.start`, or by `launch` in a host that ends with it."""

    def __init__(self, host: ProcessHost, pid: int) -> None:
        self.pid = pid
        self.host_pid = host.pid
        self._host = host
        self._is_alone = False
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._swept: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    @classmethod
    async def launch(cls, launch: ProcessLaunch) -> HostedProcess:
        """Raises ServerError where it can't be started."""
        host = await ProcessHost.begin(launch)
        try:
            process = await host.start(launch)
        except BaseException:
            await host.end()
            raise
        process._is_alone = True  # noqa: SLF001
        process._swept.add_done_callback(lambda _: host.close())  # noqa: SLF001
        return process

    @property
    def ended(self) -> Ended | None:
        return self._ended.result() if self._ended.done() else None

    async def wait_ended(self) -> Ended:
        """Until the child itself has ended; its own children may outlive it by moments."""
        return await asyncio.shield(self._ended)

    async def wait_swept(self) -> list[int]:
        """Until nothing is left of the child, its children and its files. Returns the pids that survived SIGKILL."""
        left = await asyncio.shield(self._swept)
        if self._is_alone:
            await self._host.end()
        return left

    async def end(self) -> list[int]:
        """End the child and everything below it, and wait for that. Harmless when it has ended."""
        if not self._swept.done():
            self._host.send({"stop": self.pid})
        return await self.wait_swept()

    def take_end(self, exit_code: int | None, cause: str, monotonic: float, wall: float) -> None:
        if not self._ended.done():
            self._ended.set_result(Ended(exit_code=exit_code, cause=cause, monotonic=monotonic, time=wall))

    def take_sweep(self, left: list[int]) -> None:
        if not self._swept.done():
            self._swept.set_result(left)


class ProcessHost:
    """Made by `begin`. `ready` is done when it takes a start, and raises ServerError where it ended before."""

    def __init__(self, socket_: socket.socket, launch: ProcessLaunch) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 0
        self._socket = socket_
        self._socket.setblocking(False)
        self._launch = launch
        lasting = {key: value for key, value in _environment(launch).items() if key not in VARIES}
        # These come last: setproctitle finds a process's title below the first variable, which must not change.
        self._environment = {**lasting, **{key: os.environ.get(key) for key in VARIES}}
        self._identity: Process | None = None
        self._process: HostedProcess | None = None
        self._files: list[Path] = []
        self._hosting: asyncio.Future[int] = loop.create_future()
        self._started: asyncio.Future[int] = loop.create_future()
        self._owes: ProcessLaunch | None = None  # what was ordered, and is not known to be gone
        self.ready: asyncio.Future[None] = loop.create_future()
        for future in (self._hosting, self._started, self.ready):
            future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def begin(cls, launch: ProcessLaunch, command: Sequence[str] = PLAIN) -> Self:
        """A host for `launch` and others alike. Returns while it imports. Raises ServerError, OSError."""
        await asyncio.to_thread(end_earlier, launch.mark)
        owners = [str(process) for process in map(identify, launch.watch) if process is not None]
        if len(owners) < len(launch.watch):
            raise ServerError("the server belongs to a process that is gone", "its actor was being ended")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = cls(mine, launch)
        try:
            with theirs:
                launcher = await asyncio.create_subprocess_exec(
                    *(*command, ORDERS, str(theirs.fileno()), str(launch.log), *owners),
                    env={key: value for key, value in host._environment.items() if value is not None},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            await launcher.wait()
            async with asyncio.timeout(LAUNCH_S):  # wait_for, of Python 3.11, may swallow a cancellation
                host.pid = await host._hosting
        except TimeoutError as error:
            host.close()
            raise ServerError(f"its host did not start within {LAUNCH_S:g} s", "the machine is busy") from error
        except BaseException:
            host.close()
            raise
        host._identity = identify(host.pid)
        return host

    def why_no_fork(self, launch: ProcessLaunch) -> str:
        """Why a server of `launch` can't be forked of it; "" where it can."""
        other = sorted(self._changes(launch).keys() - set(VARIES))
        return f"it was made with another {', '.join(other)}" if other else ""

    def is_gone(self) -> bool:
        return self._socket.fileno() < 0 or identify(self.pid) != self._identity

    async def start(self, launch: ProcessLaunch) -> HostedProcess:
        """Its next child, once the one before is gone. Raises ServerError; after "did not answer" nobody knows what has
        become of the order, and the host must be ended."""
        await asyncio.shield(self.ready)
        if self._process is not None:
            await self._process.end()
        if self.is_gone():
            raise ServerError("its host is gone", f"see {self._launch.log}")
        order = {
            "command": list(launch.command),
            "changes": self._changes(launch),
            "grace_s": launch.grace_s,
            "vital": launch.vital,
            "files": launch.files,
            "scratch": None if launch.scratch is None else str(launch.scratch),
            "memory_limit": launch.memory_limit,
        }
        self._owes = launch
        self._files = []
        self._started = asyncio.get_running_loop().create_future()
        self.send({"start": order})
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(self._started)
        except TimeoutError as error:
            raise ServerError(f"its host did not answer within {ANSWER_S:g} s", "the machine is busy") from error
        assert self._process is not None
        return self._process

    async def end(self) -> None:
        """End it, and what runs in it. Harmless where it has ended. Raises ServerError where it survives SIGKILL."""
        self.close()
        await asyncio.wait([self._hearing], timeout=END_S)
        if self._identity is None:
            return
        if not self._hearing.done():  # it hangs, and dies with its server
            send(self._identity, signal.SIGKILL)
        if not await asyncio.to_thread(wait_ended, [self._identity], END_S):
            raise ServerError(f"process {self.pid}, the host of a server, survives SIGKILL", "it waits in the kernel")
        await asyncio.wait([self._hearing])

    def close(self) -> None:
        """Let it end what runs, and itself, without a wait for that."""
        with contextlib.suppress(ServerError):
            self.send({"end": True})
        if not self._hosting.done():  # nobody reads that
            self._hearing.cancel()

    def send(self, order: Mapping[str, object]) -> None:
        """Raises ServerError where the order is too long; a host that is gone is seen by who waits for its answer."""
        message = json.dumps(order).encode()
        if len(message) > LONGEST_MESSAGE:
            raise ServerError(f"its command has {len(message)} bytes, of which {LONGEST_MESSAGE} can be sent")
        with contextlib.suppress(OSError):
            self._socket.send(message)

    def _changes(self, launch: ProcessLaunch) -> dict[str, str | None]:
        """Of the environment, where a child's is another than the host's."""
        its, own = _environment(launch), self._environment
        return {key: its.get(key) for key in its.keys() | own.keys() if its.get(key) != own.get(key)}

    async def _hear(self) -> None:
        loop = asyncio.get_running_loop()
        with self._socket:
            try:
                while said := await loop.sock_recv(self._socket, LONGEST_MESSAGE):
                    self._take_message(json.loads(said))
            except ConnectionError:  # it was killed with an order that it had not read
                pass
        self._fail("its host ended")
        if self._process is not None:
            self._process.take_end(None, f"its host (pid {self.pid}) was killed", time.monotonic(), time.time())
        left = [] if self._owes is None else await asyncio.to_thread(self._clear_up, self._owes)
        if self._process is not None:
            self._process.take_sweep(left)

    def _take_message(self, told: dict[str, Any]) -> None:
        match told:
            case {"event": "hosting", "pid": pid}:
                self._hosting.set_result(pid)
            case {"event": "ready"}:
                self.ready.set_result(None)
            case {"event": "started", "pid": pid}:
                self._process = HostedProcess(self, pid)
                self._started.set_result(pid)
            case {"event": "failed", "reason": reason}:
                self._owes = None
                self._fail(str(reason))
            case {"event": "files", "files": files}:
                self._files = [Path(file) for file in files]
            case {"event": "ended"} if self._process is not None:
                self._process.take_end(told["exit_code"], told["cause"], told["monotonic"], told["time"])
            case {"event": "swept"} if self._process is not None:
                self._owes = None
                self._process.take_sweep(told["left"])

    def _fail(self, why: str) -> None:
        error = ServerError(f"the server process could not be started: {why}", f"see {self._launch.log}")
        for future in (self._hosting, self.ready, self._started):
            if not future.done():
                future.set_exception(error)

    def _clear_up(self, launch: ProcessLaunch) -> list[int]:
        """What a killed host has left: the server died with it, and what bears its mark is ended here."""
        left = []
        try:
            end_earlier(launch.mark)
        except ServerError:
            left = [process.pid for process in bearing(launch.mark)]
        remove_unheld(self._files, launch.files)
        if launch.scratch is not None:
            shutil.rmtree(launch.scratch, ignore_errors=True)
        return left


def _environment(launch: ProcessLaunch) -> dict[str, str | None]:
    """With the mark. A host imports `actors` from where it was imported here, whatever the working folder."""
    variable, _, value = launch.mark.partition("=")
    path = [str(ROOT), *filter(None, [launch.environment.get("PYTHONPATH")])]
    return {**launch.environment, "PYTHONPATH": os.pathsep.join(path), variable: value}


def end_earlier(mark: str) -> None:
    """An earlier host ends by itself when its actor is gone, and removes its files. One that was killed may have left a
    daemon behind. Raises ServerError."""
    wait_ended([process for process in bearing(mark) if name(process) == HOST], timeout_s=END_S)
    give_up_at = time.monotonic() + END_S
    while left := bearing(mark):  # again: one may be forked while its parent is about to be killed
        for process in left:
            send(process, signal.SIGKILL)
        if not wait_ended(left, timeout_s=max(0.0, give_up_at - time.monotonic())):
            raise ServerError(
                f"an earlier incarnation of this server does not end: pids {[process.pid for process in left]}",
                "a process that survives SIGKILL waits in the kernel; the machine may need a restart",
            )
