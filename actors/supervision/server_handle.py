"""One server as the Coordinator's hands hold it: its actor, what it last said, and how its last life ended."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from actors.cluster.actor_calls import answer
from actors.cluster.node_identity import is_here, on_this_clock
from actors.supervision.actor_probe import ActorProbe
from actors.weights.start_weights import StartWeights
from launcher.base.errors import LauncherError, ServerError
from launcher.base.messages import Cause, Health, Overrides, ServerExit, ServerInfo, ServerState, Verdict
from launcher.policy.exit_cause import ExitFinding, find_server_cause
from launcher.policy.observed import ServerFacts
from launcher.resources.hardware import OomKillWatch

ANSWER_S = 3.0
STOP_S = 30.0
LOOK_S = 0.25
LOOK_READY_S = 1.0
"""Of a server that serves: its end is told by its own actor, in milliseconds, and each question costs two processes
about 2 ms."""
WORD_S = 2.0
"""Longest wait for the reason why a process is gone; it comes within milliseconds, on a starved machine later."""
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")
SERVES = Verdict(health=Health.HEALTHY, reason="it has generated, and nobody has found fault")


class ServerHandle:
    """`generation` is the life that was ordered last; `died` hears of the end of one that nobody ordered.

    `recovered`: the last life whose end has been got over.
    """

    def __init__(
        self, name: str, actor: Any, *, died: Callable[[ServerExit], None], changed: asyncio.Event, setup_s: float
    ) -> None:
        self.name = name
        self.generation = -1
        self.lineage: int | None = None
        self.exit: ServerExit | None = None
        self.recovered = -1
        self.progress_at: float | None = None
        self.is_abandoned = False
        self._actor = actor
        self._died = died
        self._changed = changed
        self._setup_s = setup_s
        self._info: ServerInfo | None = None
        self._is_ordered = False
        self._ended_at: dict[int, float] = {}
        self._was_ready = False
        self._failed_start = ""
        self._adopted_at = float("inf")
        self._kills = OomKillWatch()
        self.probe = ActorProbe(self._ask_info, heard=self._take_info)
        self._lost_with = ""
        self._lost_life: int | None = None
        self._gone: tuple[int, float] | None = None

    # ── seeing ──

    def begin_looking(self) -> None:
        self.probe.begin(self._interval_s)

    def adopt(self, generation: int, lineage: int | None) -> None:
        """A life that an earlier Coordinator ordered."""
        self.generation, self.lineage, self._adopted_at = generation, lineage, time.monotonic()
        self.probe.tasks.start(self._watch(generation))

    def expect(self) -> None:
        """It is about to be started: that it does not run means nothing."""
        self._is_ordered = True

    def not_started(self, why: str) -> None:
        """What was expected does not come."""
        self._is_ordered, self._failed_start = False, why

    def lost_with_node(self, node: str, reason: str) -> bool:
        """A node is lost; whether this life was on it."""
        if self._info is None or self._info.node != node or self._info.generation != self.generation:
            return False
        self._lost_with, self._lost_life = reason, self.generation
        self._changed.set()
        return True

    @property
    def info(self) -> ServerInfo | None:
        """Of the life that was ordered last, with what is known of the lineage of its weights."""
        if self._info is None or self._info.generation != self.generation:
            return None
        return dataclasses.replace(self._info, lineage=self.lineage)

    async def _ask_info(self) -> ServerInfo:
        info: ServerInfo = await answer(self._actor.info.remote(), within_s=ANSWER_S, of=self.name)
        return info

    def _take_info(self, info: ServerInfo) -> None:
        self._info = info
        if self.exit is None or self.exit.generation != self.generation:
            self._kills.look()

    def _interval_s(self) -> float:
        serves = self.info is not None and self.info.state is ServerState.READY and not self.is_over
        return LOOK_READY_S if serves and not self.probe.error else LOOK_S

    def facts(
        self,
        in_pool: ServerInfo | None,
        judged: Verdict | None,
        *,
        is_publishing: bool,
        homeless_since: float | None = None,
    ) -> ServerFacts:
        """`in_pool`: what the trainer's pool knows of it; `judged`: the HealthMonitor's verdict on this life.

        `is_publishing`: one that was READY is STALE for as long as it loads the new weights, and that is no fault.
        """
        self.probe.tasks.check()
        state, end = self._state(in_pool), self._end()
        if homeless_since is not None and not self._is_ordered and end is None:
            end = ExitFinding(cause=Cause.NODE_LOST, reason=f"no node has room for {self.name}")
            state = ServerState.FAILED if self.is_abandoned else ServerState.DEAD
        if not is_publishing:
            self._was_ready = state is ServerState.READY
        elif state is ServerState.STALE and self._was_ready:
            state = ServerState.READY
        is_mine = in_pool is not None and in_pool.generation == self.generation
        weights = in_pool if is_mine else self.info
        verdict = judged or (SERVES if state is ServerState.READY else UNKNOWN)
        if self._awaits_word(judged):
            verdict = dataclasses.replace(verdict, health=Health.SUSPECT)
        if end is not None:
            verdict = Verdict(health=Health.DEAD, reason=end.reason, cause=end.cause)
        return ServerFacts(
            name=self.name,
            state=state,
            verdict=verdict,
            weight_version=None if weights is None else weights.weight_version,
            lineage=None if weights is None else weights.lineage,
            ran_out=None if end is None else end.ran_out,
            progress_at=self.progress_at,
            homeless_since=homeless_since,
        )

    @property
    def is_over(self) -> bool:
        """Its life has ended, or is being ended."""
        return self._is_ordered or self.is_abandoned or self._end() is not None

    def _state(self, in_pool: ServerInfo | None) -> ServerState:
        if self.is_abandoned:
            return ServerState.FAILED
        if self._end() is not None:
            return ServerState.DEAD
        info = self.info
        if info is None or info.state is not ServerState.READY:
            return ServerState.STARTING
        if in_pool is None or in_pool.generation != self.generation:
            return ServerState.STALE  # it has generated, and nobody has admitted it
        return in_pool.state if in_pool.state in (ServerState.READY, ServerState.SUSPECT) else ServerState.STALE

    def _end(self) -> ExitFinding | None:
        """How its life ended; None where it lives, or is being started."""
        if self._is_ordered:
            return None
        if self._lost_life == self.generation:
            return ExitFinding(cause=Cause.NODE_LOST, reason=self._lost_with)
        if self.exit is not None and self.exit.generation == self.generation:
            killed = self._kills.risen() if is_here(self.exit.node) else self.exit.oom_kills
            found = find_server_cause(self.exit.reason.split(" | "), self.exit.exit_code, oom_kills=killed)
            return dataclasses.replace(found, reason=self.exit.reason)
        if self._info is not None and self._info.generation < self.generation:
            return ExitFinding(cause=Cause.SERVER_CRASH, reason="its actor's process ended, and the server with it")
        over = {ServerState.DEAD, ServerState.FAILED, ServerState.STOPPED}
        if self._info is not None and self._info.state in over:
            found = find_server_cause(self._info.reason.split(" | "), None)
            return dataclasses.replace(found, reason=self._info.reason or f"it is {self._info.state}")
        return self._given_up()

    def _given_up(self) -> ExitFinding | None:
        """A start that failed, or that nobody waits for any more, and of which the actor says nothing final.

        Without this a server whose actor hangs, or was never created, would be starting for ever.
        """
        if self._info is not None and self._info.state is ServerState.READY:
            return None
        is_late = time.monotonic() - self._adopted_at > self._setup_s + STOP_S
        reason = self._failed_start or (f"adopted, and still not ready after {self._setup_s:g} s" if is_late else "")
        return ExitFinding(cause=Cause.SERVER_HANG, reason=reason) if reason else None

    async def _watch(self, generation: int) -> None:
        """Hear of the end of one life as it happens. Where the actor dies, its next answer tells."""
        try:
            told: ServerExit = await answer(self._actor.wait_exit.remote(), within_s=float("inf"), of=self.name)
        except LauncherError as error:
            self.probe.error = error.message
            self._changed.set()
            return
        exit_ = on_this_clock(told)
        generation = exit_.generation
        if self._was_ordered(exit_):
            return
        self._died(exit_)  # also where the order to restart it came first: it died before it could be told
        if generation == self.generation and not self._is_ordered:
            self.exit = exit_
            self._changed.set()

    def _was_ordered(self, end: ServerExit) -> bool:
        """By its guard's word; its time decides where nobody was left to learn how it ended."""
        ordered_at = self._ended_at.get(end.generation)
        if ordered_at is None:
            return False
        return end.was_told or (end.exit_code is None and end.monotonic > ordered_at)

    def _awaits_word(self, judged: Verdict | None) -> bool:
        """Its process is seen to be gone. Its guard knows why, and may be a moment late: with the reason comes what is
        to be changed before the next start."""
        if judged is None or judged.health is not Health.DEAD or judged.cause is not Cause.SERVER_CRASH:
            return False
        if self._gone is None or self._gone[0] != self.generation:
            self._gone = self.generation, time.monotonic()
        return not self.probe.error and time.monotonic() - self._gone[1] < WORD_S

    # ── acting ──

    async def start(self, generation: int, weights: StartWeights, overrides: Overrides) -> ServerInfo:
        """End what there is, start another life, and wait until it has generated. Raises LauncherError."""
        self._order_end()
        self.generation, self.lineage = generation, weights.lineage
        self._failed_start, self._adopted_at = "its start was given up", float("inf")
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
            self.probe.tasks.start(self._watch(generation))
            info: ServerInfo = await answer(self._actor.wait_ready.remote(), within_s=self._setup_s, of=self.name)
            self._failed_start = ""
            return info
        except LauncherError as error:
            self._failed_start = error.message
            raise
        finally:
            self._is_ordered = False
            await self.probe.refresh()

    async def stop(self) -> None:
        self._order_end()
        await answer(self._actor.stop.remote(), within_s=STOP_S, of=self.name)

    def _order_end(self) -> None:
        self._is_ordered = True
        self._ended_at.setdefault(self.generation, time.monotonic())

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
