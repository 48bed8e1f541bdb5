"""The HealthMonitor as an async Ray actor.

It observes the servers of its own node itself; on other nodes the servers' own actors observe
(actors/serving/remote_process_probe.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.cluster.actor_calls import ActorAway, answer
from actors.cluster.fencing import bind_to_cluster
from actors.cluster.node_identity import is_here
from actors.monitoring.alerts import IncidentAlerts
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.memory_watch import MemoryWatch
from actors.monitoring.monitor_view import MonitorView, Watched
from actors.monitoring.reward_series import RewardSeries
from actors.serving.remote_process_probe import RemoteObservation, RemoteProcessTree
from actors.serving.sglang_client import SGLangClient
from launcher.base.clocks import clock_shift
from launcher.base.errors import JournalError, StorageError
from launcher.base.messages import ServerInfo
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canary_policy import CanaryRound
from launcher.run_files.journal import Journal, LineLog
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths

PROBE_S = 3.0
"""For a server's actor on another node to observe its processes."""
READ_AGAIN_S = 1.0

log = logging.getLogger("health_monitor")

T = TypeVar("T")


@ray.remote(num_cpus=0)
class HealthMonitorActor:
    """Nothing in `__init__` can fail: an actor whose constructor raises is never restarted."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        bind_to_cluster(config)
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._monitor: HealthMonitor | None = None
        self._alerts: IncidentAlerts | None = None
        self._journal: Journal | None = None
        self._beginning = asyncio.Lock()

    async def _ready(self) -> HealthMonitor:
        """Made on the first call, on its loop, which no file may block: the pings that show it is alive share it."""
        async with self._beginning:
            if self._monitor is None:
                self._monitor = await self._begin()
        return self._monitor

    async def _begin(self) -> HealthMonitor:
        config, paths = self._config, self._paths
        keys = await _until_read(partial(ServerKeys.read, paths.keys))
        journal = self._journal = Journal(paths.events, self._attempt, time.time, in_background=True)
        journal.record("monitor.started", subject="health_monitor", pid=os.getpid())
        self._alerts = IncidentAlerts.begun(config.alerts, paths, self._attempt)
        memory = MemoryWatch(journal, series=LineLog(paths.memory))
        series = await _until_read(partial(RewardSeries.read, paths))
        return HealthMonitor(config, journal, SGLangClient(keys), series=series, memory=memory, far=far_tree)

    async def watch(self, targets: Sequence[Watched], at: float | None = None, hold_s: float = 0.0) -> MonitorView:
        """Take these servers, and return the view: when a verdict has changed since the last one, at once where another
        asks, else after `hold_s`. `at`: now, on the caller's clock."""
        monitor = await self._ready()
        if self._journal is not None:
            self._journal.write_waiting()
        shift = 0.0 if at is None else clock_shift(at, time.monotonic())
        monitor.watch([target.shifted(shift) for target in targets])
        if hold_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    await monitor.changed.wait()
            monitor.changed.clear()
        else:
            monitor.changed.set()
        return replace(monitor.view(), at=time.monotonic())

    async def admit(self, report: BatchReport) -> Admission:
        return (await self._ready()).admit(report)

    async def canaries(self, scored: CanaryRound) -> None:
        (await self._ready()).canaries(scored)

    async def restored(self, global_step: int, onset_step: int | None = None, lineage: int | None = None) -> None:
        (await self._ready()).restored(global_step, onset_step, lineage)

    async def trust(self, name: str) -> None:
        (await self._ready()).trust(name)

    async def pids(self) -> dict[str, dict[str, int]]:
        return (await self._ready()).pids()

    async def send_alerts(self) -> None:
        """Send what the journal holds, and wait until it has left; at the end of the run."""
        await self._ready()
        if self._alerts is not None:
            await asyncio.to_thread(self._alerts.finish, self._config.alerts.timeout)


async def _until_read(read: Callable[[], T]) -> T:
    """Without the run's keys and its past nothing may be admitted: while a disk doesn't give them, nobody gets an
    answer (P7). An error would end the step loop."""
    while True:
        try:
            return await asyncio.to_thread(read)
        except (JournalError, StorageError) as error:
            log.warning("monitor.waits reason=%r", str(error))
            await asyncio.sleep(READ_AGAIN_S)


def far_tree(server: ServerInfo) -> RemoteProcessTree | None:
    """None where its processes are of this node, and can be looked at."""
    if is_here(server.node) or server.pid is None:
        return None
    pid = server.pid
    actor: Any = None

    async def ask() -> RemoteObservation:
        nonlocal actor
        if actor is None:
            actor = await asyncio.to_thread(_find, server.name)
        seen: RemoteObservation = await answer(actor.look.remote(pid), within_s=PROBE_S, of=server.name)
        return seen

    return RemoteProcessTree(ask)


def _find(name: str) -> Any:
    """The cluster's store is asked, which may be away. Raises ActorAway."""
    try:
        return ray.get_actor(name)
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise ActorAway(f"{name} can't be found: {error}") from error
