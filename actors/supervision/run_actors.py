"""Creates every actor of a run, in its driver, so that all of them end with the driver (P8).

Each does nothing until the Coordinator starts what it holds, and Ray restarts it empty when its process ends. Those of
servers that come later are created here too: the Coordinator decides, and this follows its journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from actors.cluster.placement_group import RunPlacement
from actors.monitoring.health_monitor import HealthMonitorActor
from actors.serving.sglang_server import SGLangServer
from actors.supervision.coordinator_actor import COORDINATOR, CoordinatorActor, trainer_names
from actors.supervision.run_history import LEFT, RESIZED, TOOK_OVER, index_of, server_names
from actors.training.trainer import MONITOR, Trainer
from launcher.config.schema import RunConfig
from launcher.reporting.current_status import DriverFacts
from launcher.resources.memory_history import MemoryHistory
from launcher.resources.placement import rank_name
from launcher.run_files.run_paths import RunPaths

RANK_0 = rank_name(0)
ALWAYS_BACK = {"max_restarts": -1, "max_task_retries": 0}
NO_GPU = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}


class RunActors:
    """`server_entry`: the command in SGLang's place, for tests. `trainer` is there once `create` was called; it changes
    when the other one takes over."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        placed: RunPlacement,
        server_entry: tuple[str, ...] | None = None,
    ) -> None:
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._placed = placed
        self._server_entry = server_entry
        self._all: list[Any] = []
        self._servers: dict[str, Any] = {}
        self._wanted = 0
        self._trainers: dict[str, Any] = {}
        self._monitor: Any = None
        self.trainer: Any = None

    def create(self, book: MemoryHistory, driver: DriverFacts) -> Any:
        """Servers, trainer, HealthMonitor, Coordinator. Returns the last. `driver`: as the run's status has it."""
        config, paths, attempt, placed = self._config, self._paths, self._attempt, self._placed
        self._make_servers(config.sglang.n_servers)
        for number, name in enumerate(trainer_names(config)):
            options, further = placed.options(RANK_0), placed.further_ranks()
            if number > 0:
                options, further = placed.options_of_standby(name, config), placed.further_ranks_of_standby(config)
            self._trainers[name] = self._new(
                Trainer, options, config, paths, attempt, has_monitor=True, rank_options=further
            )
        self.trainer = self._trainers[RANK_0]
        watchers = {"num_cpus": 0, "runtime_env": NO_GPU}
        self._monitor = self._new(HealthMonitorActor, {"name": MONITOR, **watchers}, config, paths, attempt)
        return self._new(
            CoordinatorActor,
            {"name": COORDINATOR, **watchers},
            config,
            paths,
            attempt,
            driver,
            has_monitor=True,
            on_gpu=placed.servers_on_gpu,
            shares_gpu=placed.shares_gpu,
            book=book,
        )

    def follow(self, event: Mapping[str, object]) -> None:
        """The fleet, and which actor is the trainer, as the Coordinator has it."""
        name, servers = str(event.get("subject")), event.get("servers")
        if event.get("event") == RESIZED and isinstance(servers, int):
            self._make_servers(servers)
        elif event.get("event") == TOOK_OVER:
            self.trainer = self._trainers[str(event.get("actor"))]
        elif event.get("event") == LEFT:
            if (ended := self._servers.pop(name, None)) is not None:
                self._all.remove(ended)
                ray.kill(ended)
            self._make_servers(self._wanted)  # there is to be one of its name again since it began to leave

    def end(self) -> None:
        """The Coordinator first, so that nobody repairs what is being ended; the hosts end every server's tree."""
        if self._monitor is not None and self._config.alerts.webhook is not None:
            ray.wait([self._monitor.send_alerts.remote()], timeout=self._config.alerts.timeout)
        for actor in reversed(self._all):
            ray.kill(actor)

    def _make_servers(self, wanted: int) -> None:
        self._wanted = wanted
        for name in server_names(wanted):
            if name not in self._servers:
                self._servers[name] = self._new_server(name)

    def _new_server(self, name: str) -> Any:
        config, paths, entry, index = self._config, self._paths, self._server_entry, index_of(name)
        is_placed = self._placed.has(name)
        options = self._placed.options(name) if is_placed else self._placed.options_of_a_joining(name, config)
        return self._new(SGLangServer, options, config, paths, index, entry)

    def _new(self, actor: Any, options: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        self._all.append(actor.options(**ALWAYS_BACK, **options).remote(*arguments, **named))
        return self._all[-1]
