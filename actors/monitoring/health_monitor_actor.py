"""The HealthMonitor as an async Ray actor: it asks the servers' actors; the Coordinator and the trainer ask it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.cluster.actor_calls import ActorAway, answer
from actors.cluster.fencing import bind_to_cluster
from actors.monitoring.alerts import IncidentAlerts
from actors.monitoring.health_monitor import ANSWER_S, HealthMonitor, MonitorReport
from actors.monitoring.memory_watch import MemoryWatch
from actors.monitoring.reward_series import RewardSeries
from actors.processes.long_poll import hold_answer
from actors.serving.server_report import ServerReport, ServerWork
from launcher.base.errors import JournalError, LauncherError, StorageError
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canary_policy import CanaryRound
from launcher.run_files.journal import Journal, LineLog
from launcher.run_files.run_paths import RunPaths

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
        journal = self._journal = Journal(paths.events, self._attempt, time.time, in_background=True)
        journal.record("monitor.started", subject="health_monitor", pid=os.getpid())
        self._alerts = IncidentAlerts.begun(config.alerts, paths, self._attempt)
        memory = MemoryWatch(journal, series=LineLog(paths.memory))
        is_ahead = config.rollout.max_head_offpolicyness > 0
        series = await _until_read(partial(RewardSeries.read, paths, is_ahead=is_ahead))
        return HealthMonitor(config, journal, ServerActors().ask, series=series, memory=memory)

    async def watch(self, servers: Mapping[str, ServerWork], hold_s: float = 0.0) -> MonitorReport:
        """Take these servers, and report: when something has changed since the last report, at once where another asks,
        else after `hold_s`."""
        monitor = await self._ready()
        if self._journal is not None:
            self._journal.write_waiting()
        monitor.watch(servers)
        await hold_answer(monitor.changed, hold_s)
        return monitor.report()

    async def admit(self, report: BatchReport) -> Admission:
        return (await self._ready()).admit(report)

    async def canaries(self, scored: CanaryRound) -> None:
        (await self._ready()).canaries(scored)

    async def restored(self, global_step: int, onset_step: int | None = None, lineage: int | None = None) -> None:
        (await self._ready()).restored(global_step, onset_step, lineage)

    async def trust(self, name: str) -> None:
        (await self._ready()).trust(name)

    async def send_alerts(self) -> None:
        """Send what the journal holds, and wait until it has left; at the end of the run."""
        await self._ready()
        if self._alerts is not None:
            await asyncio.to_thread(self._alerts.finish, self._config.alerts.timeout)


async def _until_read(read: Callable[[], T]) -> T:
    """Without the run's past nothing may be admitted: while a disk doesn't give it, nobody gets an answer (P7). An
    error would end the step loop."""
    while True:
        try:
            return await asyncio.to_thread(read)
        except (JournalError, StorageError) as error:
            log.warning("monitor.waits reason=%r", str(error))
            await asyncio.sleep(READ_AGAIN_S)


class ServerActors:
    """Found by their names. One that did not answer is looked for again: another may have its name."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    async def ask(self, name: str, work: ServerWork, hold_s: float) -> ServerReport:
        """Raises LauncherError."""
        try:
            if name not in self._found:
                self._found[name] = await asyncio.to_thread(_find, name)  # the cluster's store may be away
            call = self._found[name].report.remote(work, hold_s)
            report: ServerReport = await answer(call, within_s=hold_s + ANSWER_S, of=name)
        except LauncherError:
            self._found.pop(name, None)
            raise
        return report


def _find(name: str) -> Any:
    """Raises ActorAway."""
    try:
        return ray.get_actor(name)
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise ActorAway(f"{name} can't be found: {error}") from error
