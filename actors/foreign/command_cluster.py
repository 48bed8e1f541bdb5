"""The cluster of a run whose trainer is another project's command, as its Coordinator sees it and acts on it.

The command is a CommandTrainer in this process, and ends with it. Servers, where they are the launcher's, are behind
the door, which is their observer's trainer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar, assert_never

from actors.foreign.command_trainer import CommandTrainer
from actors.foreign.fleet import DOOR_S, FleetObserver
from actors.foreign.foreign_checkpoints import FoundOnDisk
from actors.supervision.action_executor import LAST_ORDER_S, STOP_S, ActionExecutor
from actors.supervision.checkpoint_scan import CheckpointScan
from actors.supervision.cluster_observer import MARGIN_S
from actors.supervision.coordinator import Coordinator, Facts
from actors.supervision.incident_artifacts import ArtifactCollector
from actors.supervision.run_history import RunHistory
from launcher.base.errors import CheckpointError, LauncherError, RunError, ServerError, StateError, TrainerError
from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.config.schema import RunConfig
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    Halt,
    LeaveServer,
    LoadWeights,
    ParkTrainer,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
    UnparkTrainer,
)
from launcher.policy.memory_backoff import MemorySettings
from launcher.policy.observed import ENDS, TRAINER, Observed, RunState
from launcher.policy.plan import transition
from launcher.run_files.run_paths import RunPaths

Made = TypeVar("Made")


def without_servers(config: RunConfig) -> RunConfig:
    """For a plan that is to know of none: whatever `sglang` says, the command has servers of its own."""
    return dataclasses.replace(config, sglang=dataclasses.replace(config.sglang, n_servers=0))


class CommandCluster:
    """`fleet`: of the launcher's servers; None: the command has its own. `changed` is the trainer's too, and the
    fleet's."""

    def __init__(
        self,
        config: RunConfig,
        history: RunHistory,
        trainer: CommandTrainer,
        *,
        changed: asyncio.Event,
        fleet: FleetObserver | None = None,
    ) -> None:
        self.changed = changed
        self._config = config
        self._history = history
        self._trainer = trainer
        self._fleet = fleet
        self._servers = None if fleet is None else ActionExecutor(config, history, fleet, shares_gpu=False)
        self._is_stopped = False
        self._unusable: RunError | None = None
        self._scan: CheckpointScan[FoundOnDisk] = CheckpointScan(
            lambda: trainer.checkpoints.read(trainer.steps.lines),
            unreadable=lambda reason: history.event("checkpoint.unreadable", subject="checkpoints", reason=reason),
            patience_s=config.disk.patience_s,
            was_read=True,  # those that were there are waited for, also by an attempt that never saw them
        )

    async def begin(self) -> None:
        if self._servers is not None:
            await self._servers.begin()
        self._trainer.begin()

    async def observe_run(self, *, with_checkpoints: bool = False) -> Observed:
        if self._unusable is not None:
            raise self._unusable
        trainer = self._trainer
        found = await self._scan.read() if with_checkpoints else None
        facts, incident = trainer.facts(), trainer.incident
        if self._fleet is None or self._servers is None:
            seen = Observed(servers=(), trainer=facts, checkpoints=None, memory=_memory_of(self._config))
        else:
            self._fleet.trainer.next_step = trainer.next_step
            seen = await self._servers.observe_run()
            door = seen.trainer
            facts = dataclasses.replace(
                facts, policy_version=door.policy_version, lineage=door.lineage, is_publishing=door.is_publishing
            )
        return dataclasses.replace(
            seen,
            trainer=facts,
            checkpoints=None if found is None else trainer.checkpoints.facts(found, trainer.steps.lines, incident),
            incident=incident,
            is_judged=True,
            progress_at=trainer.progress.at(TRAINER),
            is_stopped=self._is_stopped,
            disk=None,
            report_every=trainer.report_every,
        )

    def deadline_s(self, action: Action) -> float:
        config = self._config
        ends_s = self._ends_s
        match action:
            case PauseTrainer() | RestartTrainer():
                return config.health.trainer_first_s + ends_s
            case RestoreTrainer():
                return config.health.trainer_first_s + ends_s + MARGIN_S
            case ResumeTrainer():
                return DOOR_S + STOP_S
            case Halt():
                of_servers = 0.0 if self._servers is None else self._servers.deadline_s(action)
                return ends_s + LAST_ORDER_S + STOP_S + of_servers
            case _ if self._servers is not None:
                return self._servers.deadline_s(action)
            case _:
                return STOP_S

    @property
    def _ends_s(self) -> float:
        """Within which the command has ended that is told to."""
        return self._trainer.stop_s + STOP_S

    async def perform(self, action: Action) -> Facts:
        match action:
            case PauseTrainer(reason=reason):
                if reason == self._history.memory.hold_reason:
                    await self._trainer.hold()
                else:
                    await self._trainer.stop()
            case ResumeTrainer():
                return await self._or_unusable(self._trainer.resume)
            case RestartTrainer():
                await self._trainer.restart()
            case RestoreTrainer(global_step=step, onset_step=onset_step):
                self._scan.invalidate()
                await self._or_unusable(lambda: self._trainer.restore(step, onset_step))
                return {"next_step": self._trainer.next_step}
            case Halt(reinstate_after=restored):
                await self._halt(action, reinstates=restored is not None)
            case RestartServer() | AbandonServer() | LeaveServer() | LoadWeights() | AdmitServer():
                assert self._servers is not None, "only a fleet has servers"
                return await self._servers.perform(action)
            case ParkTrainer() | UnparkTrainer():
                raise StateError(f"{type(action).__name__}: a command has no process that stands by")
            case _:
                assert_never(action)
        return {}

    async def _or_unusable(self, doing: Callable[[], Awaitable[Made]]) -> Made:
        """What it refuses in so many words it would refuse again: the run ends with them. Raises RunError."""
        try:
            return await doing()
        except (CheckpointError, ServerError, TrainerError):  # may pass, or the run ends already
            raise
        except RunError as error:
            self._unusable = error
            raise

    async def _halt(self, action: Halt, *, reinstates: bool) -> None:
        """The command before its servers. Nothing here may keep the run from ending: the driver ends what stays."""
        try:
            async with asyncio.timeout(self._ends_s + LAST_ORDER_S):  # its disk may never answer who reads its steps
                await self._trainer.halt(reinstates=reinstates)
        except (LauncherError, OSError) as error:  # TimeoutError is one
            self._history.event("actor.stop_failed", subject=TRAINER, reason=str(error) or "no answer in time")
        finally:
            try:
                if self._servers is not None:
                    await self._servers.perform(dataclasses.replace(action, reinstate_after=None))
            finally:  # else a stop that fails would be ordered again and again
                self._is_stopped = True

    async def close(self) -> None:
        self._scan.close()
        closing = [self._trainer.close()]
        if self._servers is not None:
            closing.append(self._servers.close())
        await asyncio.gather(*closing, return_exceptions=True)


class CommandCoordinator(Coordinator):
    """Of a run whose trainer is a command: what is not its trainer's to do is refused to who asks for it."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        history: RunHistory,
        trainer: CommandTrainer,
        *,
        changed: asyncio.Event,
        fleet: FleetObserver | None = None,
    ) -> None:
        def pids() -> Mapping[str, int]:
            return {**({} if fleet is None else fleet.pids()), **({TRAINER: trainer.pid} if trainer.pid else {})}

        super().__init__(
            config if fleet is not None else without_servers(config),
            CommandCluster(config, history, trainer, changed=changed, fleet=fleet),
            history,
            artifacts=ArtifactCollector(paths, pids=pids),
        )
        self.trainer = trainer
        self._has_servers = fleet is not None

    async def run(self) -> RunOutcome:
        """As any Coordinator's; what the command, or its checkpoints, refuse is how the run ends. Raises StateError."""
        try:
            return await super().run()
        except StateError:
            raise
        except RunError as error:
            history, last_step = self._history, self.trainer.next_step - 1
            self._incidents.close(self._clock())
            if history.memory.ending is None:  # else it was being ended already, and this is how
                history.begun(Halt(reason=str(error)))
            if history.state not in ENDS:
                history.enter(transition(history.state, RunState.SHUTTING_DOWN), history.memory.ending_reason)
            await history.flush_in_time()  # as where it ends by a plan
            return RunOutcome(
                status=history.memory.ending or TerminalStatus.ERRORED,
                reason=history.memory.ending_reason,
                last_step=last_step if last_step >= 0 else None,
            )

    def hold(self, reason: str) -> None:
        """Raises RunError where the trainer can't be paused."""
        try:
            if reason:
                self.trainer.refuse_hold()
        except RunError:
            super().hold("")
            raise
        super().hold(reason)

    def resize(self, servers: int, reason: str) -> None:
        """Raises RunError where the servers are the command's own."""
        if not self._has_servers:
            raise RunError("this run has no servers of the launcher's", "trainer.rung=servers has")
        super().resize(servers, reason)

    async def _secure(self) -> None:
        """A full disk does not stop the command, so it must not spend the budget of its repairs."""
        await self._history.flush()


def _memory_of(config: RunConfig) -> MemorySettings:
    """The command's memory is its own: none of these gives way."""
    return MemorySettings.of(config, longest_sequence=config.gconfig.max_new_tokens, on_gpu=False, shares_gpu=False)
