"""The Coordinator's handle of one server: orders what its actor does, and takes its reports from the HealthMonitor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, answer
from actors.serving.server_report import ServerReport, ServerWork, finding_of
from actors.weights.start_weights import StartWeights
from launcher.base.errors import LauncherError, ServerError
from launcher.base.messages import Cause, Health, Overrides, ServerExit, ServerInfo, ServerState, Verdict
from launcher.policy.exit_cause import ExitFinding, find_server_cause
from launcher.policy.observed import ServerFacts

ANSWER_S = 3.0
STOP_S = 30.0
LOOK_S = 0.25
"""Between two calls of an actor that Ray is starting again."""
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")
SERVES = Verdict(health=Health.HEALTHY, reason="it has generated, and no fault was found")
ADMITTED = frozenset({ServerState.READY, ServerState.SUSPECT})
OVER = frozenset({ServerState.DEAD, ServerState.FAILED, ServerState.STOPPED})


class ServerHandle:
    """Of the incarnation that was ordered last, `generation`. `died` is called with each end that nobody ordered.

    `ordered` is STARTING while an order to start it is under way, so that it does not run means nothing; READY when
    that has ended; DEAD when it has ended without an order, or its node was lost; STOPPED by order, FAILED when given
    up for the rest of the run. What a running one does now is in its reports and in the trainer's answers.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        died: Callable[[ServerExit], None],
        changed: asyncio.Event,
        setup_s: float,
        hung_after_s: float,
    ) -> None:
        """`hung_after_s`: how long its actor may leave questions unanswered while requests to the server fail."""
        self.name = name
        self.generation = -1
        self.lineage: int | None = None  # of the weights that it started from; None: unknown
        self.ordered = ServerState.READY
        self.progress_at: float | None = None
        self._actor = actor
        self._died = died
        self._changed = changed
        self._setup_s = setup_s
        self._hung_after_s = hung_after_s
        self._info: ServerInfo | None = None
        self.silent_s = 0.0
        self._finding: ExitFinding | None = None  # why it is DEAD
        self._lost = ""  # why its node was, while it started
        self._failed_start = ""
        self._late_at = float("inf")  # when the start of an adopted one is given up
        self._was_ready = False  # before the publish that is under way
        self._ends: dict[int, float] = {}  # when each generation that nobody ordered to end did
        self._end_ordered_at: dict[int, float] = {}

    def _begin(self, ordered: ServerState, generation: int, lineage: int | None) -> None:
        self.ordered = ordered
        self.generation = generation
        self.lineage = lineage
        self._info = None
        self.silent_s = 0.0
        self._finding = None
        self._lost = self._failed_start = ""
        self._late_at = float("inf")
        self._was_ready = False

    # ── seeing ──

    @property
    def is_running(self) -> bool:
        """Its start has ended, and no end of it is known: its actor is to be asked."""
        return self.ordered is ServerState.READY and self.generation >= 0

    async def adopt(self, generation: int, lineage: int | None) -> None:
        """Take over an incarnation that an earlier Coordinator ordered."""
        self._begin(ServerState.READY, generation, lineage)
        self._late_at = time.monotonic() + self._setup_s + STOP_S
        await self._take_first_report()

    async def _take_first_report(self) -> None:
        """The next plan would else be made without it; the HealthMonitor asks for those that follow."""
        with contextlib.suppress(LauncherError):
            call = self._actor.report.remote(ServerWork(generation=self.generation))
            self.take_report(await answer(call, within_s=ANSWER_S, of=self.name))

    def expect(self) -> None:
        """It is about to be started."""
        self.ordered = ServerState.STARTING

    def not_started(self, why: str) -> None:
        """The start that was expected, or is under way, does not come."""
        self._end_start(failed=why)

    def _end_start(self, *, failed: str) -> None:
        """`failed`: why it did, "" where it has succeeded."""
        if self.ordered is not ServerState.STARTING:
            return
        self.ordered = ServerState.READY
        self._failed_start = failed
        if self._lost:
            self._die(ExitFinding(cause=Cause.NODE_LOST, reason=self._lost))

    def give_up(self) -> None:
        self.ordered = ServerState.FAILED

    def lost_with_node(self, node: str, reason: str) -> bool:
        """A node is lost; whether this incarnation was on it."""
        if (info := self.info) is None or info.node != node:
            return False
        if self.ordered is ServerState.STARTING:
            self._lost = reason
        elif self.ordered in (ServerState.READY, ServerState.DEAD):
            self._die(ExitFinding(cause=Cause.NODE_LOST, reason=reason))
        self._changed.set()
        return True

    @property
    def info(self) -> ServerInfo | None:
        """Of this incarnation, with the lineage of its weights."""
        if self._info is None or self._info.generation != self.generation:
            return None
        return replace(self._info, lineage=self.lineage)

    @property
    def serves(self) -> bool:
        return self.info is not None and self.info.state is ServerState.READY and not self.is_over

    @property
    def is_over(self) -> bool:
        """This incarnation has ended, or is being ended."""
        return self.ordered is not ServerState.READY or self._end() is not None

    def take_report(self, report: ServerReport) -> None:
        """One of before the last order ended says nothing of this incarnation."""
        if not self.is_running or report.ordered != self.generation:
            return
        self.silent_s = report.silent_s
        if report.info is None:
            return
        if report.info != self._info:
            self._changed.set()
        self._info = report.info
        if report.end is not None:
            self._take_end(report.end)

    def facts(
        self,
        in_pool: ServerInfo | None,
        judged: Verdict | None,
        *,
        is_publishing: bool,
        unschedulable_since: float | None = None,
    ) -> ServerFacts:
        """`in_pool`: what the trainer's pool knows of it; `judged`: the verdict on this incarnation, None: unknown.

        `is_publishing`: one that was READY is STALE for as long as it loads the new weights, and that is no fault.
        """
        if in_pool is not None and in_pool.generation != self.generation:
            in_pool = None
        end = self._end() or self._end_unreported(in_pool, judged)
        if end is None and unschedulable_since is not None and self.ordered is ServerState.READY:
            end = ExitFinding(cause=Cause.NODE_LOST, reason=f"Ray has found no node for {self.name} so far")
        state = self._state(end, in_pool, is_publishing=is_publishing)
        weights = in_pool or self.info
        verdict = judged or (SERVES if state is ServerState.READY else UNKNOWN)
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
            unschedulable_since=unschedulable_since,
            stale_reason=in_pool.reason if in_pool is not None and in_pool.state is ServerState.STALE else "",
        )

    def _state(self, end: ExitFinding | None, in_pool: ServerInfo | None, *, is_publishing: bool) -> ServerState:
        if self.ordered is not ServerState.READY:
            return self.ordered
        state = ServerState.DEAD if end is not None else self._state_in_pool(in_pool)
        if is_publishing:
            return ServerState.READY if state is ServerState.STALE and self._was_ready else state
        self._was_ready = state is ServerState.READY
        return state

    def _state_in_pool(self, in_pool: ServerInfo | None) -> ServerState:
        if self.info is None or self.info.state is not ServerState.READY:
            return ServerState.STARTING
        if in_pool is not None and in_pool.state in ADMITTED:
            return in_pool.state
        return ServerState.STALE  # it has generated, and nobody has admitted it

    def _end(self) -> ExitFinding | None:
        """How this incarnation ended; None where it is alive, or its end was ordered."""
        if self.ordered is ServerState.READY:
            return self._end_by_report() or self._given_up()
        return self._finding if self.ordered is ServerState.DEAD else None

    def _end_by_report(self) -> ExitFinding | None:
        if self._info is None:
            return None
        if self._info.generation < self.generation:
            older = ExitFinding(cause=Cause.SERVER_CRASH, reason=why_older(self._info, self.generation))
            return self._given_up() or older
        if self._info.state not in OVER:
            return None
        found = find_server_cause(self._info.reason.split(" | "), None)
        return replace(found, reason=self._info.reason or f"it is {self._info.state}")

    def _given_up(self) -> ExitFinding | None:
        """A start that failed, or that nobody waits for any more, and of which the actor reports nothing final.

        Without this a server whose actor hangs, or was never created, would be starting for ever.
        """
        if self._info is not None and self._info.state is ServerState.READY:
            return None
        is_late = time.monotonic() > self._late_at
        reason = self._failed_start or (f"adopted, and still not ready after {self._setup_s:g} s" if is_late else "")
        return ExitFinding(cause=Cause.SERVER_HANG, reason=reason) if reason else None

    def _end_unreported(self, in_pool: ServerInfo | None, judged: Verdict | None) -> ExitFinding | None:
        """Two witnesses agree that nobody can use it: its actor, which would report its end, answers nobody, and the
        trainer's requests to it fail. An actor that hangs beside a server that answers is no reason to end either."""
        if self.ordered is not ServerState.READY or judged is None or self.silent_s < self._hung_after_s:
            return None
        if in_pool is None or in_pool.state is not ServerState.SUSPECT:
            return None
        reason = f"its actor has not answered for {self.silent_s:.0f} s, and requests fail: {in_pool.reason}"
        return ExitFinding(cause=Cause.SERVER_HANG, reason=reason)

    def _take_end(self, end: ServerExit) -> None:
        """Also where the order to end it came first: it died before the order reached it. Each is taken once."""
        ended_at = time.monotonic() - end.age_s
        # Where nobody was left to learn how it ended, the time decides whether it was the order.
        was_ordered = end.exit_code is None and ended_at > self._end_ordered_at.get(end.generation, float("inf"))
        if end.was_told or was_ordered or end.generation in self._ends:
            return
        self._ends[end.generation] = ended_at
        self._died(end)
        if end.generation == self.generation and self.ordered is ServerState.READY:
            self._die(finding_of(end))
        self._changed.set()

    def _die(self, finding: ExitFinding) -> None:
        self.ordered = ServerState.DEAD
        self._finding = finding

    def recovered_after_s(self) -> float | None:
        """Since the end of the incarnation before this one. None where that was ordered, or this was answered once."""
        ended_at = self._ends.pop(self.generation - 1, None)
        return None if ended_at is None else time.monotonic() - ended_at

    # ── acting ──

    async def start(self, generation: int, weights: StartWeights, overrides: Overrides) -> ServerInfo:
        """End what there is, start another incarnation, and wait until it has generated. Raises LauncherError."""
        self._order_end()
        self._begin(ServerState.STARTING, generation, weights.lineage)
        why_not = "its start was given up"
        try:
            await self._end_what_runs()
            self._info = await answer(
                self._actor.start.remote(
                    generation=generation,
                    model_path=weights.path,
                    weight_version=weights.version,
                    overrides=dict(overrides),
                ),
                within_s=STOP_S,
                of=self.name,
            )
            info: ServerInfo = await answer(self._actor.wait_ready.remote(), within_s=self._setup_s, of=self.name)
            self._info = info
            why_not = ""
            return info
        except LauncherError as error:
            why_not = error.message
            raise
        finally:
            self._end_start(failed=why_not)
            if why_not:  # its log may say more than that
                await self._take_first_report()

    async def stop(self) -> None:
        self._order_end()
        if self.ordered is not ServerState.FAILED:
            self.ordered = ServerState.STOPPED
        await self._stop()

    async def _stop(self) -> None:
        report: ServerReport = await answer(self._actor.stop.remote(), within_s=STOP_S, of=self.name)
        if report.end is not None:
            self._take_end(report.end)

    def _order_end(self) -> None:
        self._end_ordered_at.setdefault(self.generation, time.monotonic())

    async def _end_what_runs(self) -> None:
        """An actor that died is being restarted by Ray; its calls fail until it is there. One that hangs is ended, for
        the next try: what it holds is to end in any case."""
        give_up_at = time.monotonic() + STOP_S
        while True:
            try:
                return await self._stop()
            except ActorAway as error:
                if time.monotonic() > give_up_at:
                    if isinstance(error.__cause__, TimeoutError):
                        await asyncio.to_thread(ray.kill, self._actor, no_restart=False)
                    raise ServerError(f"the actor of {self.name} does not come back: {error.message}") from error
            await asyncio.sleep(LOOK_S)


def why_older(info: ServerInfo, ordered: int) -> str:
    """Why its actor answers with an older generation than was ordered; a process of it that has just begun has none."""
    if info.generation >= 0:
        has = f"generation {info.generation}, {info.state}"
        return f"generation {ordered} was ordered and never begun: its actor has {has}"
    if ordered > 0:
        return "its actor's process ended, and the server with it"
    return "its actor has begun no server: the order never reached it, or its process ended"
