"""The Coordinator as a Ray actor: finds the run's other actors by name, and adopts what lives.

Ray restarts it with its constructor's arguments; whoever waits for its outcome asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from actors.coordinator import Coordinator
from actors.fleet_record import server_names
from actors.incident_keeper import IncidentKeeper
from actors.memory_ladder import MemoryLadder
from actors.ray_life import die_with_raylet
from actors.run_eyes import RunEyes
from actors.run_hands import RunHands
from actors.run_history import RunHistory
from actors.trainer import MONITOR
from launcher.config import RunConfig
from launcher.errors import UsageError
from launcher.journal import Journal
from launcher.memory_book import MemoryBook
from launcher.messages import Outcome
from launcher.run_paths import RunPaths

COORDINATOR = "coordinator"
TRAINER = "trainer"


def _find_servers(members: Sequence[str], joining: Collection[str]) -> dict[str, Any]:
    """One that was asked to join may have no actor yet: the plan has it join then."""
    found = {}
    for name in members:
        try:
            found[name] = ray.get_actor(name)
        except ValueError:
            if name not in joining:
                raise
    return found


@ray.remote
class CoordinatorActor:
    """`run` once in each life; `abort` at any time."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        *,
        has_monitor: bool,
        on_gpu: bool = False,
        shares_gpu: bool = False,
        book: MemoryBook | None = None,
    ) -> None:
        die_with_raylet()
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._has_monitor = has_monitor
        self._on_gpu = on_gpu
        self._shares_gpu = shares_gpu
        self._book = book
        self._coordinator: Coordinator | None = None
        self._running: asyncio.Task[Outcome] | None = None

    async def run(self) -> Outcome:
        """To the run's end. Raises UsageError where it can't begin."""
        if self._running is None:
            self._running = asyncio.create_task(self._make().run())
        return await asyncio.shield(self._running)

    async def ping(self) -> None:
        """Its answer says that its loop turns."""

    async def abort(self, reason: str) -> None:
        if self._coordinator is not None:
            self._coordinator.abort(reason)

    async def add_server(self, reason: str) -> str:
        """Have one more server join; its name. Raises UsageError."""
        return self._begun().add_server(reason)

    async def remove_server(self, name: str, reason: str) -> None:
        """Have a server leave. Raises UsageError."""
        self._begun().remove_server(name, reason)

    def _begun(self) -> Coordinator:
        if self._coordinator is None:
            raise UsageError("the Coordinator has not begun", "ask again in a second")
        return self._coordinator

    def _make(self) -> Coordinator:
        journal = Journal(self._paths.events, self._attempt, time.time)
        history = RunHistory.read(journal, self._paths.events, self._attempt)
        memory = MemoryLadder(self._config, history, self._book, on_gpu=self._on_gpu, shares_gpu=self._shares_gpu)
        eyes = RunEyes(
            self._config,
            self._paths,
            history,
            servers=_find_servers(history.fleet.members(server_names(self._config)), history.fleet.joining),
            trainer=ray.get_actor(TRAINER),
            monitor=ray.get_actor(MONITOR) if self._has_monitor else None,
            memory=memory,
        )
        hands = RunHands(self._config, history, eyes, shares_gpu=self._shares_gpu)
        keeper = IncidentKeeper(self._paths, pids=eyes.pids)
        self._coordinator = Coordinator(self._config, hands, history, keeper=keeper)
        return self._coordinator
