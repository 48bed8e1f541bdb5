"""The servers as the Coordinator has them: what each is ordered and reports, what it has to do, why it hangs.

orders ─► ServerHandle ─► its actor ─► HealthMonitor ─► its reports ─► ServerHandle ─► ServerFacts, for the plan
trainer's view ─► ServerLoads ─► ServerWork, by which the actor judges its server
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, answer
from actors.serving.server_log_tail import decisive_lines, tail
from actors.serving.server_report import ServerReport, ServerWork, finding_of
from actors.supervision.trainer_handle import read_log
from actors.weights.start_weights import StartWeights
from launcher.base.errors import LauncherError, ServerError
from launcher.base.messages import Cause, Health, Overrides, ServerExit, ServerInfo, ServerState, TrainerView, Verdict
from launcher.policy.exit_cause import ExitFinding, find_server_cause
from launcher.policy.observed import ServerFacts

ANSWER_S = 3.0
STOP_S = 30.0
LOOK_S = 0.25
"""Between two calls of an actor that Ray is starting again."""
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")
SERVES = Verdict(health=Health.HEALTHY, reason="it has generated, and no fault was found")
ADMITTED = frozenset({ServerState.READY, ServerState.SUSPECT})
LATE_S = 2.0
"""So much later than a load begins may it be seen."""
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


class ServerLoads:
    """What each server has to do, as the trainer and the Coordinator know it: its clients' requests, and a load of
    weights.

    A server that starts has its own deadline; one that is sent weights owes nobody a token until it has them, for
    `limit_s` at most: one that was given up after all that time is stuck. One that merely waits for weights (its
    trainer starts, a disk is full) answers as any other.
    """

    def __init__(self, slots: Mapping[str, ServerHandle], *, limit_s: float) -> None:
        self._slots = slots
        self._limit_s = limit_s
        self._ordered: set[str] = set()
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def loads(self, name: str) -> Iterator[None]:
        """Inside the block it is sent weights by order of the Coordinator: the deadline begins anew."""
        self._since[name] = time.monotonic()
        self._ordered.add(name)
        try:
            yield
        finally:
            self._ordered.discard(name)

    def work(self, view: TrainerView) -> dict[str, ServerWork]:
        """Of each server whose start has ended."""
        in_pool = {(info.name, info.generation): info for info in view.servers}
        found = {}
        for name, slot in self._slots.items():
            known = in_pool.get((name, slot.generation))
            is_loading = name in self._ordered or _is_sent(known, view) or self._is_stuck(known)
            if not (slot.serves and is_loading):
                self._since.pop(name, None)
            if slot.is_running:
                found[name] = ServerWork(
                    generation=slot.generation,
                    waiting=view.in_flight.get(name, 0) if slot.serves else 0,
                    loading_s=self._loading_s(name) if slot.serves and is_loading else None,
                    loading_limit_s=self._limit_s,
                )
        return found

    def _loading_s(self, name: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault(name, now)

    def _is_stuck(self, known: ServerInfo | None) -> bool:
        """Its load took all its time, and it has nothing newer."""
        if known is None or known.state is not ServerState.STALE or known.name not in self._since:
            return False
        return self._loading_s(known.name) >= self._limit_s - LATE_S


def _is_sent(known: ServerInfo | None, view: TrainerView) -> bool:
    """The trainer sends it weights by itself."""
    if known is None:
        return False
    return known.name in view.loading or (view.phase == "publish" and known.weight_version != view.policy_version)


class HangReasons:
    """Servers that were declared dead for a hang, and whose log shows that memory ran out. Each log is read once for an
    incarnation, by `read`. `log`: where a server's log is, by its name.

    A server whose memory ran out in one thread may leave the others waiting for ever. SGLang 0.5.17 on the CPU, seen:
    no room for the thread that loads weights, `MemoryError` in the log, and the scheduler waits for that thread.
    """

    def __init__(self, log: Callable[[str], Path]) -> None:
        self._log = log
        self._found: dict[tuple[str, int], ExitFinding | None] = {}

    @property
    def has_unread(self) -> bool:
        return None in self._found.values()

    def explain(self, facts: ServerFacts, generation: int) -> ServerFacts:
        """The same, or out of memory in place of hung where its log shows that."""
        verdict = facts.verdict
        if verdict.health is not Health.DEAD or verdict.cause is not Cause.SERVER_HANG:
            return facts
        found = self._found.setdefault((facts.name, generation), None)
        if found is None or found.ran_out is None:
            return facts
        reason = f"{verdict.reason}; its log says: {found.line}"
        return replace(facts, verdict=replace(verdict, reason=reason, cause=found.cause), ran_out=found.ran_out)

    async def read(self) -> None:
        for (name, generation), found in list(self._found.items()):
            if found is None:
                text = part_of(await read_log(partial(tail, self._log(name), 0)), generation)
                self._found[name, generation] = find_server_cause(decisive_lines(text), None)


def part_of(text: str, generation: int) -> str:
    """What one incarnation wrote; all of the text where its beginning is too long ago to be in it."""
    *_, part = re.split(rf"^==== generation {generation}, ", text, flags=re.MULTILINE)
    return part
