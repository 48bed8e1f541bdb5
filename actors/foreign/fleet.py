"""Our servers behind another project's trainer, observed and repaired as for the launcher's own, with the door in the
place of the trainer's actor: it holds the weights. The command itself is another part of the same cluster
(command_cluster.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, ActorProbe, Silence, answer
from actors.cluster.node_identity import is_here
from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_actor import DOOR
from actors.foreign.kept_weights import LINEAGE
from actors.processes.exit_watch import process_ended
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_history import RunHistory
from actors.supervision.trainer_handle import ANSWER_S, ProcessId, TrainerHandle
from launcher.base.errors import RunError, ServerError
from launcher.base.messages import Health, Incident, ServerInfo, ServerState, TrainerView, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.observed import Observed, TrainerFacts
from launcher.reporting.current_status import RunHealth
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.run_paths import RunPaths

DOOR_S, AGAIN_S = 60.0, 0.5
"""For the door to answer; between two questions, while Ray restarts it."""
SERVES = Verdict(health=Health.HEALTHY, reason="it is always there: Ray restarts it")


class DoorHandle(TrainerHandle):
    """The door, as the Coordinator sees its trainer: it holds weights, gives them to servers, and is never ordered to
    step. One that hangs is ended, and Ray restarts it; one that never answered gets more time, it may be starting.
    `silence`: for how long it has been asked in vain."""

    of = "the door"

    def __init__(self, actor: Any, *, next_step: Callable[[], int], hung_after_s: float, **parts: Any) -> None:
        super().__init__(actor, **parts)
        self.silence = Silence()
        self._next_step = next_step
        self._hung_after_s = hung_after_s
        self.view = TrainerView(pid=0, is_started=True, phase="publish")
        self.probe = ActorProbe(self._ask_view, heard=self._take_view, missed=self._miss)

    def adopt(self) -> None:
        """It has no loop."""

    def _take_view(self, answered: tuple[Any, TrainerView, int]) -> None:
        self.view = answered[1]
        self.silence.answered()
        self._watch(self._process)

    def _miss(self) -> None:
        self.silence.missed()
        if self.probe.unanswered * ANSWER_S >= self._hung_after_s * (1 if self.view.pid else 4):
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
            verdict=SERVES,
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
        self._door = DoorHandle(
            trainer,
            next_step=self._next_step,
            hung_after_s=health.supervisor_silence_s,
            ended=self._trainer_ended,
            changed=self.changed,
            health=health,
            log=log,
        )
        return self._door

    def incident(self, now: float) -> Incident | None:
        return None

    def pids(self) -> dict[str, int]:
        infos = {name: slot.info for name, slot in self.slots.items()}
        return {name: info.pid for name, info in infos.items() if info and info.pid is not None and is_here(info.node)}

    async def look(self, *, is_stopped: bool, with_checkpoints: bool = False) -> Observed:
        seen = await super().look(is_stopped=is_stopped, with_checkpoints=with_checkpoints)
        if seen.disk is not None and time.monotonic() - seen.disk.first < self._config.disk.patience_s:
            self._door.silence.answered()  # the disk may keep it from that: it counts from when that is well again
        return dataclasses.replace(
            seen, disk=None, door_silent_s=self._door.silence.seconds, door_error=self._door.probe.error
        )

    def _trainer_ended(self, reason: str) -> None:
        self._history.event("door.died", subject=DOOR, reason=reason)


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


class Fleet:
    """The servers behind the door, which `executor` sees and acts on; as `Door` of the command in front of it.
    `servers` of this moment, for who looks at the run."""

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
        self._door = door
        self._counted: CompletionCounts | None = None
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
        self.executor = ActionExecutor(config, history, self._observer, shares_gpu=False)

    @property
    def servers(self) -> Sequence[ServerInfo]:
        return self._observer.trainer.view.servers

    @property
    def pids(self) -> Mapping[str, int]:
        return self._observer.pids()

    def health(self) -> RunHealth | None:
        return self._observer.health()

    async def new_client(self, is_first: bool) -> None:
        """The door forgets the incarnation before."""
        await asked(lambda: self._door.new_client.remote(is_first), within_s=DOOR_S)

    async def figures(self) -> Mapping[str, float]:
        counted = None
        with contextlib.suppress(RunError):  # this step and the next go without
            counted = await answer(self._door.completions.remote(), within_s=ANSWER_S, of="the door")
        figures = {} if counted is None else counted.figures_since(self._counted)
        self._counted = counted
        return figures

    def waits_for(self) -> str:
        """Why the command's requests wait; "" where a server takes them."""
        view = self._observer.trainer.view
        if view.busy or view.phase == "publish":
            return "new weights"
        return "" if any(one.state is ServerState.READY for one in view.servers) else "a server"
