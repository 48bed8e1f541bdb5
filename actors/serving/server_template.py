"""Starts a server's incarnations as forks of one process that has imported SGLang (actors/processes/forked_start.py).

The first start makes the template and waits for its imports, which it would otherwise make itself; every later one is
a fork. A template that is gone, or that was made with another environment or another architecture of model, is made
anew by the next start, which then takes as long as the first. Where one does not come about, or does not answer, that
server is run as a program, and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from actors.processes.guarded_process import GuardedProcess, ProcessLaunch
from actors.processes.process_template import ProcessTemplate
from actors.processes.process_tree import set_niceness
from actors.serving.sglang_command import CPU_ENTRY
from launcher.base.errors import ServerError

PAUSE_S = 300.0
"""After a template that came to nothing; until then servers are run as programs."""


class ServerTemplate:
    """Of one server. `entry`: how the command of a server begins that can be forked; a GPU's is never."""

    def __init__(self, entry: Sequence[str] = CPU_ENTRY, *, within_s: float) -> None:
        """`within_s`: for its imports."""
        self._entry = tuple(entry)
        self._within_s = within_s
        self._template: ProcessTemplate | None = None
        self._architectures: object = None
        self._paused_until = 0.0
        self._stopped: asyncio.Future[None] | None = None
        self._imports = asyncio.Event()

    def forks(self, command: Sequence[str]) -> bool:
        return tuple(command[: len(self._entry)]) == self._entry and time.monotonic() >= self._paused_until

    async def imports(self) -> None:
        """Until a start waits for the template's imports."""
        await self._imports.wait()

    def stop_waiting(self) -> None:
        """The start that waits for the imports fails; they go on, for the next one."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def start(
        self, make: Callable[[], ProcessLaunch], *, model_path: str, niceness: int | None
    ) -> GuardedProcess:
        """A server of what `make` returns, with a `scratch` of its own at each call. `niceness`: of imports and server;
        None: as this process's. Raises ServerError."""
        launch = make()
        self._stopped = None
        try:
            template = await self._ready(launch, model_path, niceness)
            return await template.fork(launch)
        except (ServerError, OSError) as error:
            if self._stopped is not None and self._stopped.done():
                raise
            await self.end()
            self._paused_until = time.monotonic() + PAUSE_S
            _say(launch.log, f"started without its template: {error}")
            return await GuardedProcess.launch(make())

    async def end(self) -> None:
        """Harmless where there is none. Raises ServerError where it survives SIGKILL."""
        template, self._template = self._template, None
        if template is not None:
            await template.end()

    async def _ready(self, launch: ProcessLaunch, model_path: str, niceness: int | None) -> ProcessTemplate:
        """A template that `launch` can be forked of. Raises ServerError, OSError."""
        architectures = _architectures(model_path)
        if self._template is not None and (why := self._why_not(self._template, launch, architectures)):
            _say(launch.log, f"a new template: {why}")
            await self.end()
        if self._template is None:
            made = _of_template(launch, (*self._entry, "--model-path", model_path))
            _say(launch.log, f"template: {shlex.join(made.command)}")
            self._template = await ProcessTemplate.launch(made)
            self._architectures = architectures
        template = self._template
        if not template.ready.done():
            own = os.getpriority(os.PRIO_PROCESS, 0)
            set_niceness(template.pid, own if niceness is None else niceness)
            await self._wait(template)
            set_niceness(template.pid, own)
        template.ready.result()
        return template

    def _why_not(self, template: ProcessTemplate, launch: ProcessLaunch, architectures: object) -> str:
        if self._architectures not in (None, architectures):
            return f"it was made for {self._architectures}, not {architectures}"
        return template.why_not(launch)

    async def _wait(self, template: ProcessTemplate) -> None:
        self._stopped = asyncio.get_running_loop().create_future()
        self._imports.set()
        try:
            waits = (template.ready, self._stopped)
            done, _ = await asyncio.wait(waits, timeout=self._within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._imports.clear()
        if self._stopped in done:
            raise ServerError("it was stopped while its template imported")
        if not done:
            raise ServerError(f"it did not import within {self._within_s:g} s")


def _of_template(launch: ProcessLaunch, command: tuple[str, ...]) -> ProcessLaunch:
    assert launch.scratch is not None
    scratch = launch.scratch.with_name(f"{launch.scratch.name}-t")
    environment = {**launch.environment, "TMPDIR": str(scratch)}
    return replace(launch, command=command, environment=environment, scratch=scratch, vital="", files="", grace_s=0.0)


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
