"""Observes a server's processes on another node: its actor reads /proc there, and the HealthMonitor asks the actor.

    HealthMonitor ─► RemoteProcessTree ─ each second ─► the server's actor ─► RemoteProcessProbe ─► /proc of its node

`RemoteProcessTree` has the methods of `ServerProcesses` and uses the last answer, so no call waits. An answer that is
too old shows nothing, and what can't be seen is never a reason to kill (P7).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from actors.processes.process_tree import identify
from actors.serving.server_processes import ServerProcesses
from launcher.base.errors import LauncherError
from launcher.policy.observation_history import ProcessLook

ASK_EVERY_S = 1.0
FRESH_S = 5.0


class ProcessTreeView(Protocol):
    """What a ServerWatch needs."""

    def is_gone(self) -> bool: ...

    def look(self) -> Mapping[str, ProcessLook] | None: ...

    def pids(self) -> dict[str, int]: ...

    def tokens(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObservation:
    """What was seen of one incarnation of a server, on its own node."""

    is_gone: bool
    processes: Mapping[str, ProcessLook]
    pids: Mapping[str, int]
    tokens: int | None


class RemoteProcessProbe:
    """Runs on the server's node. Keeps the process tree that was asked for last."""

    def __init__(self) -> None:
        self._pid = 0
        self._tree: ServerProcesses | None = None

    def look(self, pid: int) -> RemoteObservation:
        if pid != self._pid:
            process = identify(pid)
            self._pid, self._tree = pid, None if process is None else ServerProcesses(process)
        tree = self._tree
        if tree is None or tree.is_gone():
            return RemoteObservation(is_gone=True, processes={}, pids={}, tokens=None)
        return RemoteObservation(is_gone=False, processes=tree.look(), pids=tree.pids(), tokens=tree.tokens())


class RemoteProcessTree:
    """The process tree of a server on another node. `ask` calls its actor and raises LauncherError."""

    def __init__(
        self, ask: Callable[[], Awaitable[RemoteObservation]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._seen: RemoteObservation | None = None
        self._seen_at = self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def is_gone(self) -> bool:
        """It has ended there, or its actor was restarted, perhaps elsewhere: then its server died first."""
        return self._seen is not None and self._seen.is_gone

    def look(self) -> Mapping[str, ProcessLook] | None:
        now = self._clock()
        if (self._asking is None or self._asking.done()) and now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._hear())
        seen = self._fresh()
        return None if seen is None else seen.processes

    def pids(self) -> dict[str, int]:
        return {} if self._seen is None else dict(self._seen.pids)

    def tokens(self) -> int | None:
        seen = self._fresh()
        return None if seen is None else seen.tokens

    def _fresh(self) -> RemoteObservation | None:
        return self._seen if self._clock() - self._seen_at <= FRESH_S else None

    async def _hear(self) -> None:
        with contextlib.suppress(LauncherError):  # its last answer grows old
            self._seen = await self._ask()
            self._seen_at = self._clock()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
