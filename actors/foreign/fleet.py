"""Our servers behind another project's trainer: the Coordinator, with the door in the place of the trainer's actor.

Everything about servers is the Coordinator's, as for the launcher's own trainer. Everything about the command is
ForeignSupervisor's, in the same process and with the same RunHistory: its start and its end, its incidents, its steps,
and the state of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, ActorProbe, answer
from actors.cluster.node_identity import is_here
from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_actor import DOOR
from actors.foreign.foreign_faults import ForeignFault
from actors.foreign.foreign_supervisor import ForeignSupervisor
from actors.foreign.kept_weights import LINEAGE
from actors.processes.exit_watch import process_ended
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.coordinator import Coordinator
from actors.supervision.incident_artifacts import ArtifactCollector
from actors.supervision.incident_tracker import IncidentTracker
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_history import RunHistory
from actors.supervision.trainer_handle import ANSWER_S, TrainerHandle
from actors.supervision.trainer_signs import ProcessId
from launcher.adapters.trainer_adapter import StepSeen
from launcher.base.errors import RunError, ServerError
from launcher.base.messages import Health, Incident, ServerInfo, ServerState, TrainerView, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.incident_policy import OF_LEARNING
from launcher.policy.observed import ENDS, Observed, RecoveryPlan, RunState, TrainerFacts
from launcher.reporting.current_status import RunHealth
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.run_paths import RunPaths

DOOR_S, AGAIN_S = 60.0, 0.5
"""For the door to answer; between two questions, while Ray restarts it."""
SUPERVISED = Verdict(health=Health.HEALTHY, reason="the command has a supervisor of its own")


class DoorHandle(TrainerHandle):
    """The door, as the Coordinator sees its trainer: it holds weights, gives them to servers, and is never ordered to
    step. One that hangs is ended, and Ray restarts it."""

    def __init__(self, actor: Any, *, next_step: Callable[[], int], hung_after_s: float, **parts: Any) -> None:
        super().__init__(actor, **parts)
        self._next_step = next_step
        self._hung_after_s = hung_after_s
        self.view = TrainerView(pid=0, is_started=True, phase="publish")
        self.probe = ActorProbe(self._ask_view, heard=self._take_view, missed=self._miss)

    def adopt(self) -> None:
        """It has no loop."""

    def _take_view(self, answered: tuple[Any, TrainerView, int]) -> None:
        self.view = answered[1]
        self._watch(self._process)

    def _miss(self) -> None:
        if self.probe.unanswered * ANSWER_S >= self._hung_after_s and self.view.pid:
            self.probe.unanswered = 0
            self._ended("it answers nobody: it is ended")
            self.probe.tasks.start(asyncio.to_thread(ray.kill, self.actor, no_restart=False))

    async def _judge_always(self) -> None:
        """Unanswered questions are counted in place of it."""

    async def _wait_end(self, process: ProcessId) -> None:
        if await process_ended(process.pid):
            self._ended(f"process {process.pid} ended; Ray restarts it, and its addresses stay")
            self.view = dataclasses.replace(self.view, phase="publish", servers=(), in_flight={}, loading=())
            self._changed.set()

    def facts(self, unschedulable_since: float | None = None) -> TrainerFacts:
        """While the door is away, no server can be sent anything: as if it were sending by itself."""
        self.probe.tasks.check()
        return TrainerFacts(
            verdict=SUPERVISED,
            is_loaded=True,
            is_paused=False,
            policy_version=self.view.policy_version,
            lineage=LINEAGE,
            next_step=self._next_step(),
            is_publishing=self.view.phase == "publish",
        )

    def incident(self, now: float) -> Incident | None:
        return None


class FleetObserver(ClusterObserver):
    """Without what concerns the launcher's own trainer: its rewards, its checkpoints and its disk."""

    has_trainer = False

    def __init__(self, config: RunConfig, *parts: Any, next_step: Callable[[], int], **named: Any) -> None:
        self._next_step = next_step
        super().__init__(config, *parts, **named)

    def _handle_of(self, trainer: Any, log: Path) -> TrainerHandle:
        health = self._config.health
        return DoorHandle(
            trainer,
            next_step=self._next_step,
            hung_after_s=health.supervisor_silence_s,
            ended=self._trainer_ended,
            changed=self.changed,
            health=health,
            log=log,
        )

    def incident(self, now: float) -> Incident | None:
        return None

    def pids(self) -> dict[str, int]:
        infos = {name: slot.info for name, slot in self.slots.items()}
        return {name: info.pid for name, info in infos.items() if info and info.pid is not None and is_here(info.node)}

    async def look(self, *, is_stopped: bool, with_checkpoints: bool = False) -> Observed:
        seen = await super().look(is_stopped=is_stopped, with_checkpoints=with_checkpoints)
        return dataclasses.replace(seen, disk=None)

    def _trainer_ended(self, reason: str) -> None:
        self._history.event("door.died", subject=DOOR, reason=reason)


class FleetCoordinator(Coordinator):
    """Ends when the supervisor of the command has ended, or when no server can be had any more."""

    def __init__(
        self, config: RunConfig, cluster: ActionExecutor, history: RunHistory, artifacts: ArtifactCollector
    ) -> None:
        super().__init__(config, cluster, history, artifacts=artifacts)
        self._incidents = IncidentTracker(history, artifacts, spared=OF_LEARNING)

    def _enter(self, made: RecoveryPlan) -> None:
        if made.state is RunState.SHUTTING_DOWN or made.state in ENDS:
            super()._enter(made)

    async def _secure(self) -> None:
        """A full disk does not stop the command, so it must not spend the budget of the servers that it asks."""
        await self._history.flush()

    def _observe(self, look: Observed) -> Observed:
        """Who asks for the end asks the supervisor: the command is stopped first."""
        return dataclasses.replace(super()._observe(look), abort_reason="")


async def asked(call: Callable[[], Any], *, within_s: float) -> Any:
    """What the door answers, asked again while Ray starts or restarts it. Raises ServerError."""
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            return await answer(call(), within_s=within_s, of="the door")
        except ActorAway as error:
            if time.monotonic() > give_up_at:
                raise ServerError(error.message) from error
            await asyncio.sleep(AGAIN_S)


class ServedSupervisor(ForeignSupervisor):
    """Of a command whose servers are a fleet's. `resizes`: the fleet's own."""

    def __init__(self, *parts: Any, door: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._door = door
        self._counted: CompletionCounts | None = None
        self.resizes: Callable[..., None] = super().resize

    def resize(self, servers: int, reason: str) -> None:
        self.resizes(servers, reason)

    async def _start(self, step: int, *, is_again: bool) -> None:
        """The door first forgets the incarnation before."""
        is_first = self._checkpoints.path_of(step) is None
        await asked(lambda: self._door.new_client.remote(is_first), within_s=DOOR_S)
        await super()._start(step, is_again=is_again)

    async def _take(self, seen: Sequence[StepSeen]) -> ForeignFault | None:
        """With what the door has answered since the step before."""
        if seen:
            counted = None
            with contextlib.suppress(RunError):  # this step and the next go without
                counted = await answer(self._door.completions.remote(), within_s=ANSWER_S, of="the door")
            self.steps.beside = {} if counted is None else counted.figures_since(self._counted)
            self._counted = counted
        return await super()._take(seen)


class Fleet:
    """`servers` of this moment, for who looks at the run."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        history: RunHistory,
        *,
        next_step: Callable[[], int],
        servers: Mapping[str, Any],
        monitor: Any,
        door: Any,
        book: MemoryHistory | None,
        on_gpu: bool,
    ) -> None:
        """`servers`, `monitor`, `door`: actors."""
        self._observer = FleetObserver(
            config,
            paths,
            history,
            next_step=next_step,
            servers=servers,
            trainer=door,
            monitor=monitor,
            memory=OomBackoff(config, history, book, on_gpu=on_gpu, shares_gpu=False),
        )
        artifacts = ArtifactCollector(paths, pids=self._observer.pids)
        executor = ActionExecutor(config, history, self._observer, shares_gpu=False)
        self.coordinator = FleetCoordinator(config, executor, history, artifacts)

    @property
    def servers(self) -> Sequence[ServerInfo]:
        return self._observer.trainer.view.servers

    def health(self) -> RunHealth | None:
        return self._observer.health()

    def waits_for(self) -> str:
        """Why the command's requests wait; "" where a server takes them."""
        view = self._observer.trainer.view
        if view.busy or view.phase == "publish":
            return "new weights"
        return "" if any(one.state is ServerState.READY for one in view.servers) else "a server"
