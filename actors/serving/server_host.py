"""The host of one server's actor (actors/processes/process_host.py), and when it is made anew.

On a CPU it has imported SGLang, and each incarnation is a fork of it. The first start waits for its imports, which it
would otherwise make itself. A host that is gone, or that was made with another environment or for another architecture
of model, is made anew by the next start, which then takes as long as the first. Where that does not come about, servers
are run as programs for a while, as on a GPU always, and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from actors.processes.hosted_process import PLAIN, HostedProcess, ProcessHost, ProcessLaunch
from actors.serving.sglang_command import CPU_ENTRY
from launcher.base.errors import ServerError

PAUSE_S = 300.0
"""After a host whose imports came to nothing; until then servers are run as programs."""


class ServerHost:
    """`entry`: how the command of a server begins that can be forked; a GPU's is never. `importing` is set while a
    start waits for imports."""

    def __init__(self, entry: Sequence[str] = CPU_ENTRY, *, within_s: float) -> None:
        """`within_s`: for its imports."""
        self._entry = tuple(entry)
        self._within_s = within_s
        self._host: ProcessHost | None = None
        self._forks = False
        self._architectures: object = None
        self._paused_until = 0.0
        self._stopped: asyncio.Future[None] | None = None
        self.importing = asyncio.Event()

    def stop_waiting(self) -> None:
        """The start that waits for the imports fails; they go on, for the next one."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def start(self, launch: ProcessLaunch, *, model_path: str) -> HostedProcess:
        """Raises ServerError."""
        forks = tuple(launch.command[: len(self._entry)]) == self._entry and time.monotonic() >= self._paused_until
        self._stopped = None
        try:
            return await (await self._ready(launch, model_path, forks=forks)).start(launch)
        except (ServerError, OSError) as error:
            if not forks or (self._stopped is not None and self._stopped.done()):
                raise
            _say(launch.log, f"run as a program: {error}")
        await self.end()
        self._paused_until = time.monotonic() + PAUSE_S
        return await (await self._ready(launch, model_path, forks=False)).start(launch)

    async def end(self) -> None:
        """With what runs in it. Harmless where there is none. Raises ServerError where it survives SIGKILL."""
        host, self._host = self._host, None
        if host is not None:
            await host.end()

    async def _ready(self, launch: ProcessLaunch, model_path: str, *, forks: bool) -> ProcessHost:
        """A host for `launch`. Raises ServerError, OSError."""
        architectures = _architectures(model_path) if forks else None
        if self._host is not None and (why := self._why_not(self._host, launch, architectures, forks=forks)):
            if self._forks:
                _say(launch.log, f"a new host: {why}")
            await self.end()
        if self._host is None:
            command = (*self._entry, "--model-path", model_path) if forks else PLAIN
            if forks:
                _say(launch.log, f"host: {shlex.join(command)}")
            self._host = await ProcessHost.begin(launch, command)
            self._architectures = architectures
            self._forks = forks
        host = self._host
        if not host.ready.done():
            await self._wait(host)
        return host

    def _why_not(self, host: ProcessHost, launch: ProcessLaunch, architectures: object, *, forks: bool) -> str:
        if host.is_gone():
            return "it is gone"
        if forks != self._forks:
            return "servers are forked" if forks else "servers are run as programs"
        if self._architectures not in (None, architectures):
            return f"it was made for {self._architectures}, not {architectures}"
        return host.why_no_fork(launch) if forks else ""

    async def _wait(self, host: ProcessHost) -> None:
        self._stopped = asyncio.get_running_loop().create_future()
        if self._forks:
            self.importing.set()
        try:
            waits = (host.ready, self._stopped)
            done, _ = await asyncio.wait(waits, timeout=self._within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.importing.clear()
        if self._stopped in done:
            raise ServerError("it was stopped while its host imported")
        if not done:
            raise ServerError(f"its host did not import within {self._within_s:g} s")


def _architectures(model_path: str) -> object:
    """As its config.json has them; None where they can't be read, and SGLang imports the files of all."""
    try:
        return json.loads((Path(model_path) / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _say(log: Path, what: str) -> None:
    """In the server's log, where the disk takes it."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")  # as the lines around it, and with their zone
    with contextlib.suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"==== {now}: {what}\n".encode())
