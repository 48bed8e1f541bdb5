"""The actor of the Coordinator whose trainer is another project's command, and its creation in the driver.

The command runs in it. Ray restarts it empty when its process ends; the command has ended with it, and is restarted
from what the run's memory and its files say.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import ray

from actors.cluster.node_identity import alive_nodes
from actors.foreign.command_cluster import CommandCoordinator
from actors.foreign.command_trainer import CommandTrainer
from actors.foreign.door_actor import DOOR, DoorActor
from actors.foreign.fleet import FleetObserver, asked
from actors.foreign.foreign_process import inherited
from actors.monitoring.alerts import IncidentAlerts
from actors.monitoring.health_monitor import HealthMonitorActor
from actors.supervision.coordinator_actor import RunActor, Seen, find_servers
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_actors import NO_GPU, RANK_0, RunActors
from actors.supervision.run_history import RunHistory
from actors.training.trainer import MONITOR
from launcher.base.errors import ResourceError
from launcher.base.messages import RunOutcome, TrainerStatus
from launcher.config.schema import RunConfig
from launcher.reporting.current_status import DriverFacts, RunHealth
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

NAME = "foreign_trainer"


@ray.remote
class ForeignTrainerActor(RunActor):
    """`run` once in each incarnation; the others at any time."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        driver: DriverFacts,
        variables: Mapping[str, str],
        *,
        has_servers: bool = False,
        book: MemoryHistory | None = None,
        on_gpu: bool = False,
    ) -> None:
        """`has_servers`: they are the launcher's, and the door is an actor before this one. `book`, `on_gpu`: of their
        memory. The door is found by its name: a handle as an argument is an object that a restart could miss."""
        super().__init__(config, paths, attempt, driver)
        self._has_servers = has_servers
        self._book = book
        self._on_gpu = on_gpu
        self._fleet: FleetObserver | None = None
        self._variables = variables
        self._trainer: CommandTrainer | None = None

    def _seen(self) -> Seen | None:
        made = self._trainer
        if made is None:
            return None
        status = TrainerStatus(
            phase="idle" if made.is_paused else "train" if made.pid else "start",
            next_step=made.next_step,
            total_steps=made.steps.total or 0,
            steps_per_epoch=0,
            policy_version=0,
            pid=os.getpid(),
            seconds_in_phase=time.monotonic() - made.since,
        )
        return status, () if self._fleet is None else self._fleet.trainer.view.servers, ()

    def _health(self) -> RunHealth | None:
        return None if self._fleet is None else self._fleet.health()

    async def _lead(self, journal: Journal, history: RunHistory) -> RunOutcome:
        config, paths, changed = self._config, self._paths, asyncio.Event()
        variables = dict(self._variables)
        if self._has_servers:
            door: Any = await asyncio.to_thread(ray.get_actor, DOOR)
            self._fleet = FleetObserver(
                config,
                paths,
                history,
                servers=await asyncio.to_thread(find_servers, config, history),
                trainer=door,
                monitor=await asyncio.to_thread(ray.get_actor, MONITOR),
                memory=OomBackoff(config, history, self._book, on_gpu=self._on_gpu, shares_gpu=False),
            )
            changed = self._fleet.changed
            addresses = await asked(lambda: door.addresses.remote(), within_s=config.rollout.setup_timeout)
            variables[config.trainer.addresses_env] = ",".join(addresses)
        door_handle = None if self._fleet is None else self._fleet.trainer
        trainer = self._trainer = CommandTrainer(
            config, paths, self._attempt, history, variables, changed=changed, door=door_handle
        )
        coordinator = CommandCoordinator(config, paths, history, trainer, changed=changed, fleet=self._fleet)
        alerts = None
        if not self._has_servers:  # else the HealthMonitor sends them
            alerts = IncidentAlerts.begun(config.alerts, paths, self._attempt)
        try:
            return await self._following(coordinator, journal)
        finally:
            if alerts is not None:
                await asyncio.to_thread(alerts.finish, config.alerts.timeout)


class ForeignActors:
    """In the driver, in the place of RunActors."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self.trainer: Any = None

    def create(self, driver: DriverFacts) -> Any:
        """The one actor; it ends with the driver. `driver`: as the run's status has it. Raises ResourceError where no
        node could ever hold it."""
        trainer = self._config.trainer
        for key, name, needed in (("num_cpus", "CPU", trainer.num_cpus), ("num_gpus", "GPU", trainer.num_gpus)):
            most = max((node["Resources"].get(name, 0) for node in alive_nodes()), default=0)
            if needed > most:
                raise ResourceError(
                    f"trainer.{key}={needed:g}, and no node has more than {most:g}",
                    f"set trainer.{key} to that or less",
                )
        actor: Any = ForeignTrainerActor
        self.trainer = actor.options(
            name=NAME, num_cpus=trainer.num_cpus, num_gpus=trainer.num_gpus, max_restarts=-1, max_task_retries=0
        ).remote(self._config, self._paths, self._attempt, driver, inherited())
        return self.trainer

    def follow(self, event: Mapping[str, object]) -> None:
        """No server comes or leaves, and nothing takes over."""

    def end(self) -> None:
        if self.trainer is not None:
            ray.kill(self.trainer)


class ServedActors(RunActors):
    """In the driver, where the command's servers are the launcher's: these, their monitor, the door and the command."""

    def create(self, book: MemoryHistory, driver: DriverFacts) -> Any:
        config, paths, attempt = self._config, self._paths, self._attempt
        self._make_servers(config.sglang.n_servers)
        watchers = {"num_cpus": 0, "runtime_env": NO_GPU}
        self._monitor = self._new(HealthMonitorActor, {"name": MONITOR, **watchers}, config, paths, attempt)
        self._new(DoorActor, {"name": DOOR, **watchers}, config, paths, attempt)
        options = {**self._placed.options(RANK_0), "name": NAME}
        if config.trainer.num_gpus:  # beside the reserved bundles, where Ray finds them
            options = {"name": NAME, "num_cpus": config.trainer.num_cpus, "num_gpus": config.trainer.num_gpus}
        parts = {"has_servers": True, "book": book, "on_gpu": self._placed.servers_on_gpu}
        self.trainer = self._new(ForeignTrainerActor, options, config, paths, attempt, driver, inherited(), **parts)
        return self.trainer
