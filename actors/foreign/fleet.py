"""Our servers behind another project's trainer, observed and repaired as for the launcher's own, with the door in the
place of the trainer's actor: it holds the weights. The command itself is another part of the same cluster
(command_cluster.py), and asks the door through the same handle."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, ActorProbe, Silence, answer
from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_actor import DOOR
from actors.foreign.kept_weights import LINEAGE
from actors.processes.exit_watch import process_ended
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.trainer_handle import ANSWER_S, ProcessId, TrainerHandle
from launcher.base.errors import RunError, ServerError
from launcher.base.messages import Health, Incident, ServerState, TrainerView, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.observed import Observed, TrainerFacts

DOOR_S, AGAIN_S = 60.0, 0.5
"""For the door to answer; between two questions, while Ray restarts it."""
SERVES = Verdict(health=Health.HEALTHY, reason="it is always there: Ray restarts it")


class DoorHandle(TrainerHandle):
    """The door, as the Coordinator sees its trainer: it holds weights, gives them to servers, and is never ordered to
    step. One that hangs is ended, and Ray restarts it; one that never answered gets more time, it may be starting.
    `silence`: for how long it has been asked in vain. `next_step`: of the command in front of it."""

    of = "the door"
    next_step = 0

    def __init__(self, actor: Any, *, health: HealthConfig, **parts: Any) -> None:
        super().__init__(actor, health=health, **parts)
        self.silence = Silence()
        self._counted: CompletionCounts | None = None
        self._hung_after_s = health.supervisor_silence_s
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
            next_step=self.next_step,
            is_publishing=self.view.phase == "publish",
        )

    # ── for the command ──

    async def new_client(self, is_first: bool) -> None:
        """Another incarnation begins, with the first weights or with others. Raises ServerError."""
        await asked(lambda: self.actor.new_client.remote(is_first), within_s=DOOR_S)

    async def figures(self) -> Mapping[str, float]:
        """Of what the command was answered since this was last asked; empty where that is not known."""
        counted = None
        with contextlib.suppress(RunError):  # this step and the next go without
            counted = await answer(self.actor.completions.remote(), within_s=ANSWER_S, of=self.of)
        figures = {} if counted is None else counted.figures_since(self._counted)
        self._counted = counted
        return figures

    def waits_for(self) -> str:
        """Why the command's requests wait; "" where a server takes them."""
        if self.view.busy or self.view.phase == "publish":
            return "new weights"
        return "" if any(one.state is ServerState.READY for one in self.view.servers) else "a server"


class FleetObserver(ClusterObserver):
    """Without what concerns the launcher's own trainer: its rewards, its checkpoints and its disk. Its trainer is the
    door."""

    has_trainer = False
    handle_type = DoorHandle
    trainer: DoorHandle

    def incident(self, now: float) -> Incident | None:
        return None

    async def observe_run(self, *, is_stopped: bool, with_checkpoints: bool = False) -> Observed:
        seen = await super().observe_run(is_stopped=is_stopped, with_checkpoints=with_checkpoints)
        if seen.disk is not None and time.monotonic() - seen.disk.first < self._config.disk.patience_s:
            self.trainer.silence.answered()  # the disk may keep it from that: it counts from when that is well again
        return dataclasses.replace(
            seen, disk=None, door_silent_s=self.trainer.silence.seconds, door_error=self.trainer.probe.error
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
