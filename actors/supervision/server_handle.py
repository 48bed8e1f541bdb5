"""The Coordinator's handle of one server: starts and stops its actor, and knows how each incarnation ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from actors.cluster.actor_calls import answer
from actors.cluster.actor_probe import ActorProbe
from actors.cluster.node_identity import is_here, on_this_clock
from actors.supervision.handle_states import (
    ServerDead,
    ServerFailed,
    ServerIncarnationState,
    ServerRunning,
    ServerStarting,
    ServerStopped,
    state_unless_running,
    why_older,
)
from actors.weights.start_weights import StartWeights
from launcher.base.errors import LauncherError, ServerError
from launcher.base.messages import Cause, Health, Overrides, ServerExit, ServerInfo, ServerState, Verdict
from launcher.policy.exit_cause import ExitFinding, find_server_cause
from launcher.policy.observed import ServerFacts
from launcher.resources.hardware import OomKillWatch

ANSWER_S = 3.0
STOP_S = 30.0
LOOK_S = 0.25
LOOK_READY_S = 4.0
"""Of a server that serves: its actor reports its end in milliseconds, and each question costs two processes 2 ms."""
REASON_S = 2.0
"""Longest wait for the reason why a process is gone; it comes within milliseconds, on a starved machine later."""
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")
SERVES = Verdict(health=Health.HEALTHY, reason="it has generated, and no fault was found")
ADMITTED = frozenset({ServerState.READY, ServerState.SUSPECT})
OVER = frozenset({ServerState.DEAD, ServerState.FAILED, ServerState.STOPPED})


class ServerHandle:
    """`state` is that of the incarnation that was ordered last. `died` is called with each end that nobody ordered."""

    def __init__(
        self, name: str, actor: Any, *, died: Callable[[ServerExit], None], changed: asyncio.Event, setup_s: float
    ) -> None:
        self.name = name
        self.state: ServerIncarnationState = ServerRunning(generation=-1, lineage=None)
        self.progress_at: float | None = None
        self._actor = actor
        self._died = died
        self._changed, self._setup_s = changed, setup_s
        self._info: ServerInfo | None = None
        self._last_exit: ServerExit | None = None
        self._end_ordered_at: dict[int, float] = {}
        self._kills = OomKillWatch()
        self.probe = ActorProbe(self._ask_info, heard=self._take_info)

    @property
    def generation(self) -> int:
        return self.state.generation

    # ── seeing ──

    def begin_looking(self) -> None:
        self.probe.begin(self._interval_s)

    def adopt(self, generation: int, lineage: int | None) -> None:
        """Take over an incarnation that an earlier Coordinator ordered."""
        late_at = time.monotonic() + self._setup_s + STOP_S
        self.state = ServerRunning(generation=generation, lineage=lineage, late_at=late_at)
        self.probe.tasks.start(self._watch_exit(generation))

    def expect(self) -> None:
        """It is about to be started."""
        self.state = ServerStarting(generation=self.state.generation, lineage=self.state.lineage)

    def not_started(self, why: str) -> None:
        """The start that was expected, or is under way, does not come."""
        self._end_start(failed=why)

    def _end_start(self, *, failed: str) -> None:
        """`failed`: why it did, "" where it has succeeded."""
        match self.state:
            case ServerStarting(generation=generation, lineage=lineage, lost=""):
                self.state = ServerRunning(generation=generation, lineage=lineage, failed_start=failed)
            case ServerStarting(lost=reason):
                self._die(ExitFinding(cause=Cause.NODE_LOST, reason=reason))
            case ServerRunning() | ServerDead() | ServerStopped() | ServerFailed():
                pass
            case _ as unreachable:
                assert_never(unreachable)

    def give_up(self) -> None:
        self.state = ServerFailed(generation=self.state.generation, lineage=self.state.lineage)

    def lost_with_node(self, node: str, reason: str) -> bool:
        """A node is lost; whether this incarnation was on it."""
        if (info := self.info) is None or info.node != node:
            return False
        match self.state:
            case ServerStarting():
                self.state = replace(self.state, lost=reason)
            case ServerRunning() | ServerDead():
                self._die(ExitFinding(cause=Cause.NODE_LOST, reason=reason))
            case ServerStopped() | ServerFailed():
                pass
            case _ as unreachable:
                assert_never(unreachable)
        self._changed.set()
        return True

    @property
    def info(self) -> ServerInfo | None:
        """Of this incarnation, with the lineage of its weights."""
        if self._info is None or self._info.generation != self.state.generation:
            return None
        return replace(self._info, lineage=self.state.lineage)

    @property
    def serves(self) -> bool:
        return self.info is not None and self.info.state is ServerState.READY and not self.is_over

    @property
    def is_over(self) -> bool:
        """This incarnation has ended, or is being ended."""
        return not isinstance(self.state, ServerRunning) or self._end() is not None

    def facts(
        self,
        in_pool: ServerInfo | None,
        judged: Verdict | None,
        *,
        is_publishing: bool,
        unschedulable_since: float | None = None,
    ) -> ServerFacts:
        """`in_pool`: what the trainer's pool knows of it; `judged`: the HealthMonitor's verdict on this incarnation.

        `is_publishing`: one that was READY is STALE for as long as it loads the new weights, and that is no fault.
        """
        self.probe.tasks.check()
        end = self._end()
        if end is None and unschedulable_since is not None and isinstance(self.state, ServerRunning):
            end = ExitFinding(cause=Cause.NODE_LOST, reason=f"Ray has found no node for {self.name} so far")
        if in_pool is not None and in_pool.generation != self.state.generation:
            in_pool = None
        state = self._state(end, in_pool, is_publishing=is_publishing)
        weights = in_pool or self.info
        return ServerFacts(
            name=self.name,
            state=state,
            verdict=self._verdict(state, end, judged),
            weight_version=None if weights is None else weights.weight_version,
            lineage=None if weights is None else weights.lineage,
            ran_out=None if end is None else end.ran_out,
            progress_at=self.progress_at,
            unschedulable_since=unschedulable_since,
            stale_reason=in_pool.reason if in_pool is not None and in_pool.state is ServerState.STALE else "",
        )

    def _state(self, end: ExitFinding | None, in_pool: ServerInfo | None, *, is_publishing: bool) -> ServerState:
        if not isinstance(self.state, ServerRunning):
            return state_unless_running(self.state)
        state = ServerState.DEAD if end is not None else self._state_in_pool(in_pool)
        if is_publishing:
            return ServerState.READY if state is ServerState.STALE and self.state.was_ready else state
        self.state = replace(self.state, was_ready=state is ServerState.READY)
        return state

    def _state_in_pool(self, in_pool: ServerInfo | None) -> ServerState:
        if self.info is None or self.info.state is not ServerState.READY:
            return ServerState.STARTING
        if in_pool is not None and in_pool.state in ADMITTED:
            return in_pool.state
        return ServerState.STALE  # it has generated, and nobody has admitted it

    def _verdict(self, state: ServerState, end: ExitFinding | None, judged: Verdict | None) -> Verdict:
        if end is not None:
            return Verdict(health=Health.DEAD, reason=end.reason, cause=end.cause)
        verdict = judged or (SERVES if state is ServerState.READY else UNKNOWN)
        return replace(verdict, health=Health.SUSPECT) if self._awaits_reason(verdict) else verdict

    def _awaits_reason(self, verdict: Verdict) -> bool:
        """Its process is gone. Its host knows why, and may be a moment late: the reason decides what is to be changed
        before the next start."""
        if verdict.health is not Health.DEAD or verdict.cause is not Cause.SERVER_CRASH:
            return False
        if not isinstance(self.state, ServerRunning):
            return False
        since = time.monotonic() if self.state.gone_since is None else self.state.gone_since
        self.state = replace(self.state, gone_since=since)
        return not self.probe.error and time.monotonic() - since < REASON_S

    def _end(self) -> ExitFinding | None:
        """How this incarnation ended; None where it is alive, or its end was ordered."""
        match self.state:
            case ServerStarting() | ServerStopped() | ServerFailed():
                return None
            case ServerDead(finding=finding):
                return finding
            case ServerRunning() as running:
                return self._end_by_answer(running) or self._given_up(running)
            case _ as unreachable:
                assert_never(unreachable)

    def _end_by_answer(self, running: ServerRunning) -> ExitFinding | None:
        if self._info is None:
            return None
        if self._info.generation < running.generation:
            return ExitFinding(cause=Cause.SERVER_CRASH, reason=why_older(self._info, running.generation))
        if self._info.state not in OVER:
            return None
        found = find_server_cause(self._info.reason.split(" | "), None)
        return replace(found, reason=self._info.reason or f"it is {self._info.state}")

    def _given_up(self, running: ServerRunning) -> ExitFinding | None:
        """A start that failed, or that nobody waits for any more, and of which the actor reports nothing final.

        Without this a server whose actor hangs, or was never created, would be starting for ever.
        """
        if self._info is not None and self._info.state is ServerState.READY:
            return None
        is_late = time.monotonic() > running.late_at
        reason = running.failed_start or (f"adopted, and still not ready after {self._setup_s:g} s" if is_late else "")
        return ExitFinding(cause=Cause.SERVER_HANG, reason=reason) if reason else None

    async def _ask_info(self) -> ServerInfo:
        info: ServerInfo = await answer(self._actor.info.remote(), within_s=ANSWER_S, of=self.name)
        return info

    def _take_info(self, info: ServerInfo) -> None:
        if info != self._info:
            self._changed.set()
        self._info = info
        if not isinstance(self.state, ServerDead):
            self._kills.look()

    def _interval_s(self) -> float:
        return LOOK_READY_S if self.serves and not self.probe.error else LOOK_S

    async def _watch_exit(self, generation: int) -> None:
        """Learn of the end of one incarnation as it happens, asking again where Ray lost the question."""
        while True:
            try:
                exit_: ServerExit = await answer(self._actor.wait_exit.remote(), within_s=float("inf"), of=self.name)
            except LauncherError as error:
                self.probe.error = error.message
                self._changed.set()
            else:
                self._take_exit(on_this_clock(exit_))
                if exit_.generation >= generation:  # else a Coordinator before this one was just having it replaced
                    return
            await asyncio.sleep(LOOK_S)
            if self.state.generation != generation or not isinstance(self.state, ServerStarting | ServerRunning):
                return

    def _take_exit(self, exit_: ServerExit) -> None:
        if self._was_ordered(exit_):
            return
        self._died(exit_)  # also where the order to restart it came first: it died before the order reached it
        if exit_.generation == self.state.generation and isinstance(self.state, ServerRunning | ServerDead):
            self._last_exit = exit_
            killed = self._kills.risen() if is_here(exit_.node) else exit_.oom_kills
            found = find_server_cause(exit_.reason.split(" | "), exit_.exit_code, oom_kills=killed)
            if isinstance(self.state, ServerRunning):
                self._die(replace(found, reason=exit_.reason))
            self._changed.set()

    def _was_ordered(self, end: ServerExit) -> bool:
        """As its host reports, whoever ordered it; the time decides where nobody was left to learn how it ended."""
        ordered_at = self._end_ordered_at.get(end.generation, float("inf"))
        return end.was_told or (end.exit_code is None and end.monotonic > ordered_at)

    def _die(self, finding: ExitFinding) -> None:
        self.state = ServerDead(generation=self.state.generation, lineage=self.state.lineage, finding=finding)

    def recovered_after_s(self) -> float | None:
        """Since the end of the incarnation before this one. None where that was ordered, or this was answered once."""
        end = self._last_exit
        if end is None or end.generation != self.state.generation - 1:
            return None
        self._last_exit = None
        return time.monotonic() - end.monotonic

    # ── acting ──

    async def start(self, generation: int, weights: StartWeights, overrides: Overrides) -> ServerInfo:
        """End what there is, start another incarnation, and wait until it has generated. Raises LauncherError."""
        self._order_end()
        self.state = ServerStarting(generation=generation, lineage=weights.lineage)
        why_not = "its start was given up"
        try:
            await self._until_it_answers()
            await answer(self._actor.stop.remote(), within_s=STOP_S, of=self.name)
            await answer(
                self._actor.start.remote(
                    generation=generation,
                    model_path=weights.path,
                    weight_version=weights.version,
                    overrides=dict(overrides),
                ),
                within_s=STOP_S,
                of=self.name,
            )
            self.probe.tasks.start(self._watch_exit(generation))
            info: ServerInfo = await answer(self._actor.wait_ready.remote(), within_s=self._setup_s, of=self.name)
            why_not = ""
            return info
        except LauncherError as error:
            why_not = error.message
            raise
        finally:
            self._end_start(failed=why_not)
            await self.probe.refresh()

    async def stop(self) -> None:
        self._order_end()
        if not isinstance(self.state, ServerFailed):
            self.state = ServerStopped(generation=self.state.generation, lineage=self.state.lineage)
        await answer(self._actor.stop.remote(), within_s=STOP_S, of=self.name)

    def _order_end(self) -> None:
        self._end_ordered_at.setdefault(self.state.generation, time.monotonic())

    async def _until_it_answers(self) -> None:
        """An actor that died is being restarted by Ray; its calls fail until it is there."""
        give_up_at = time.monotonic() + STOP_S
        while True:
            await self.probe.refresh()
            if not self.probe.error:
                return
            if time.monotonic() > give_up_at:
                raise ServerError(f"the actor of {self.name} does not come back: {self.probe.error}")
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self.probe.close()
