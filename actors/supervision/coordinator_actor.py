"""The Coordinator as a Ray actor: finds the run's other actors by name, and adopts what lives.

Ray restarts it with its constructor's arguments; whoever waits for its outcome asks again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from actors.cluster.fencing import MARGIN_S, bind_to_cluster, lease_of
from actors.cluster.node_identity import this_node
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.artifact_collector import ArtifactCollector
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.coordinator import Coordinator
from actors.supervision.fleet_record import server_names
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.progress_tracker import furthest_step
from actors.supervision.run_history import RunHistory
from actors.training.trainer import MONITOR
from launcher.base.messages import RunOutcome
from launcher.config.schema import RunConfig
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.control_requests import ControlRequest, wanted
from launcher.run_files.journal import Journal, last_of
from launcher.run_files.run_paths import RunPaths

HEED_S = 0.5
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
        book: MemoryHistory | None = None,
    ) -> None:
        bind_to_cluster(config)
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._has_monitor = has_monitor
        self._on_gpu = on_gpu
        self._shares_gpu = shares_gpu
        self._book = book
        self._coordinator: Coordinator | None = None
        self._running: asyncio.Task[RunOutcome] | None = None

    async def run(self) -> RunOutcome:
        """To the run's end. Raises UsageError where it can't begin."""
        if self._running is None:
            self._running = asyncio.create_task(self._begin())
        return await asyncio.shield(self._running)

    async def ping(self) -> None:
        """Its answer says that its loop turns."""

    async def abort(self, reason: str) -> None:
        if self._coordinator is not None:
            self._coordinator.abort(reason)

    async def _begin(self) -> RunOutcome:
        """One that was started anew on another node waits until the one before it has ended, behind a partition too."""
        journal = Journal(self._paths.events, self._attempt, time.time)
        node = this_node()
        before = last_of(self._paths.events, "coordinator.placed", self._attempt).get("node")
        if before not in (None, node) and (lease_s := lease_of(self._config)) is not None:
            await asyncio.sleep(lease_s + MARGIN_S)
        journal.record("coordinator.placed", subject="coordinator", reason="on its node", node=node, pid=os.getpid())
        coordinator = self._make()
        heeding = asyncio.create_task(self._heed(coordinator))
        try:
            return await coordinator.run()
        finally:
            heeding.cancel()

    async def _heed(self, coordinator: Coordinator) -> None:
        """What a person wants of the run, as it stands in its file: level, not edge, so it outlives a Coordinator."""
        while True:
            asked = await asyncio.to_thread(wanted, self._paths)
            wish = ControlRequest.RUN if asked is None else asked.wish
            coordinator.hold(
                f"a pause {asked.description}" if asked is not None and wish is ControlRequest.PAUSE else ""
            )
            if asked is not None and wish is ControlRequest.STOP:
                coordinator.abort(asked.description)
            elif asked is not None and asked.servers is not None:
                coordinator.resize(asked.servers, without=asked.leaves, reason=asked.description)
            await asyncio.sleep(HEED_S)

    def _make(self) -> Coordinator:
        journal = Journal(self._paths.events, self._attempt, time.time)
        events, attempt = self._paths.events, self._attempt
        history = RunHistory.read(journal, events, attempt, clock=time.monotonic, node=this_node())
        memory = OomBackoff(self._config, history, self._book, on_gpu=self._on_gpu, shares_gpu=self._shares_gpu)
        eyes = ClusterObserver(
            self._config,
            self._paths,
            history,
            servers=_find_servers(history.fleet.members(server_names(self._config)), history.fleet.joining),
            trainer=ray.get_actor(TRAINER),
            monitor=ray.get_actor(MONITOR) if self._has_monitor else None,
            memory=memory,
            furthest=furthest_step(self._paths.metrics, attempt),
        )
        hands = ActionExecutor(self._config, history, eyes, shares_gpu=self._shares_gpu)
        artifacts = ArtifactCollector(self._paths, pids=eyes.pids)
        self._coordinator = Coordinator(self._config, hands, history, artifacts=artifacts)
        return self._coordinator
