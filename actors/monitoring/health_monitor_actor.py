"""The HealthMonitor as an async Ray actor: it answers whatever its servers do.

Servers of its own node it looks at itself; those of others have their own actors look
(actors/serving/remote_process_probe.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import ray

from actors.cluster.actor_calls import answer
from actors.cluster.fencing import hold_lease
from actors.cluster.node_identity import clock_shift, is_here, lease_of
from actors.cluster.raylet_lifetime import die_with_raylet
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.incident_alerts import IncidentAlerts
from actors.monitoring.monitor_view import MonitorView, Watched
from actors.serving.remote_process_probe import RemoteObservation, RemoteProcessTree
from actors.serving.sglang_client import SGLangClient
from launcher.base.messages import ServerInfo
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canary_policy import CanaryRound
from launcher.run_files.journal import Journal
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths

TELL_S = 0.5
SIGHT_S = 3.0
"""For a server's actor on another node to look at its processes."""


@ray.remote(num_cpus=0)
class HealthMonitorActor:
    """Nothing in `__init__` can fail."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        die_with_raylet()
        hold_lease(lease_of(config))
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._monitor: HealthMonitor | None = None
        self._alerts: IncidentAlerts | None = None
        self._telling: asyncio.Task[None] | None = None

    def _begun(self) -> HealthMonitor:
        """Made on the first call, since an actor whose constructor raises is never restarted, and on its loop."""
        if self._monitor is None:
            keys = ServerKeys.read(self._paths.keys)
            journal = Journal(self._paths.events, self._attempt, time.time)
            journal.record("monitor.started", subject="health_monitor", pid=os.getpid())
            if self._config.alerts.webhook is not None:
                self._alerts = IncidentAlerts(self._config.alerts, self._paths, journal, self._attempt)
                self._telling = asyncio.create_task(self._go_on_telling(self._alerts))
            self._monitor = HealthMonitor(self._config, self._paths, journal, SGLangClient(keys), far=far_tree)
        return self._monitor

    async def watch(self, targets: Sequence[Watched], at: float | None = None) -> MonitorView:
        """Tell it the servers, and hear what it says of everything. `at`: now, on the clock of whoever tells."""
        monitor = self._begun()
        shift = 0.0 if at is None else clock_shift(at, time.monotonic())
        monitor.watch([target.shifted(shift) for target in targets])
        return replace(monitor.view(), at=time.monotonic())

    async def wait_changed(self, timeout_s: float) -> MonitorView:
        """The view as soon as a verdict changes, at the latest after `timeout_s`."""
        monitor = self._begun()
        try:
            async with asyncio.timeout(timeout_s):
                await monitor.changed.wait()
        except TimeoutError:
            return monitor.view()
        monitor.changed.clear()
        return monitor.view()

    async def admit(self, report: BatchReport) -> Admission:
        return self._begun().admit(report)

    async def canaries(self, scored: CanaryRound) -> None:
        self._begun().canaries(scored)

    async def restored(self, global_step: int) -> None:
        self._begun().restored(global_step)

    async def trust(self, name: str) -> None:
        self._begun().trust(name)

    async def pids(self) -> dict[str, dict[str, int]]:
        return self._begun().pids()

    async def tell_people(self) -> None:
        """Put what there is to tell in order, and wait until it is on its way; at the end of the run."""
        self._begun()
        if self._alerts is not None:
            self._alerts.refresh()
            await asyncio.to_thread(self._alerts.wait_told, self._config.alerts.timeout)

    async def _go_on_telling(self, alerts: IncidentAlerts) -> None:
        while True:
            alerts.refresh()
            await asyncio.sleep(TELL_S)


def far_tree(server: ServerInfo) -> RemoteProcessTree | None:
    """None where its processes are of this node, and can be looked at."""
    if is_here(server.node) or server.pid is None:
        return None
    actor, pid = ray.get_actor(server.name), server.pid

    async def ask() -> RemoteObservation:
        sight: RemoteObservation = await answer(actor.look.remote(pid), within_s=SIGHT_S, of=server.name)
        return sight

    return RemoteProcessTree(ask)
