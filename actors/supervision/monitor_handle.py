"""The Coordinator's handle of the HealthMonitor: sends it the server list periodically and caches its latest verdicts.
It answers when a verdict changes, or after a second.

A monitor that hangs or restarts delays nobody: its verdicts grow old and are dropped, and unknown is never a reason to
kill (P7). One that was restarted learns the servers from the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from actors.cluster.actor_calls import answer
from actors.cluster.actor_probe import ActorProbe
from actors.monitoring.monitor_view import MonitorView, Watched
from actors.supervision.server_handle import ServerHandle
from launcher.base.clocks import clock_shift
from launcher.base.errors import LauncherError
from launcher.base.messages import Health, Incident, ServerInfo, ServerState, TrainerView, Verdict
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.observation_history import Task

ANSWER_S = 2.0
HOLD_S = 1.0
LOOK_S = 0.05
FRESH_S = 5.0
LATE_S = 2.0
"""So much later than a load begins may it be seen."""
LONGEST_TURN_S = 5.0
"""One turn's share of a silence: a longer one was a pause of the Coordinator's own."""


class MonitorHandle:
    """`targets`: the servers to watch, as they are now. `changed` is set when a verdict changes.

    `hung` is called when the monitor's process is ended because it answers nobody: a stopped process is alive to Ray,
    and the trainer would wait at the gate for ever. `hung_after_s` is counted in unanswered questions of ANSWER_S each,
    so that a pause of the Coordinator's own is not taken for the monitor's; one that never answered gets more time, it
    may be starting. `silent_s`: for how long it has been asked in vain.
    """

    def __init__(
        self,
        actor: Any,
        *,
        targets: Callable[[], Sequence[Watched]],
        changed: asyncio.Event,
        hung_after_s: float,
        hung: Callable[[], None] = lambda: None,
    ) -> None:
        self._actor = actor
        self._hung = hung
        self._hung_after_s = hung_after_s
        self.silent_s = 0.0
        self._targets = targets
        self._changed = changed
        self._view: MonitorView | None = None
        self._turned_at = float("inf")
        self._hold_s = HOLD_S
        self._probe = ActorProbe(self._ask, heard=self._take, missed=self._note_silence)

    @property
    def incident(self) -> Incident | None:
        self._probe.tasks.check()
        view = self._fresh()
        return None if view is None else view.incident

    @property
    def is_heard(self) -> bool:
        """It has answered lately: that it names no incident says that there is none."""
        return self._fresh() is not None

    def verdict(self, name: str, generation: int) -> Verdict | None:
        """On one incarnation of one server; doubt of its weights is one too. None where nothing is known."""
        view = self._fresh()
        for server in () if view is None else view.servers:
            if (server.name, server.generation) == (name, generation):
                if server.doubt and server.verdict.health is not Health.DEAD:
                    return Verdict(health=Health.SUSPECT, reason=server.doubt, cause=server.doubt_cause)
                return server.verdict
        return None

    def _fresh(self) -> MonitorView | None:
        return self._view if self._probe.is_fresh(FRESH_S) else None

    def begin_looking(self) -> None:
        self._turned_at = time.monotonic()
        self._probe.begin(lambda: LOOK_S)

    async def trust(self, name: str) -> None:
        """Its weights have been sent again, or verified."""
        with contextlib.suppress(LauncherError):  # a monitor that has restarted doubts nobody
            await answer(self._actor.trust.remote(name), within_s=ANSWER_S, of="the HealthMonitor")
            await self._refresh_now()

    async def restored(self, global_step: int, onset_step: int | None, lineage: int) -> None:
        with contextlib.suppress(LauncherError):  # one that restarts reads it from the journal
            call = self._actor.restored.remote(global_step, onset_step, lineage)
            await answer(call, within_s=ANSWER_S, of="the HealthMonitor")
            await self._refresh_now()

    async def canaries(self, scored: CanaryRound) -> None:
        """A round that was scored while training is paused; what is thought of it is known when this returns."""
        await answer(self._actor.canaries.remote(scored), within_s=ANSWER_S, of="the HealthMonitor")
        await self._refresh_now()

    async def release(self) -> None:
        """Watch nobody from now on: the servers are about to be stopped, and an end that was ordered is no alarm."""
        await self._probe.close()
        await answer(self._actor.watch.remote([], time.monotonic(), False), within_s=ANSWER_S, of="the HealthMonitor")

    async def _refresh_now(self) -> None:
        self._hold_s = 0.0
        await self._probe.refresh()

    async def _ask(self) -> MonitorView:
        hold_s, self._hold_s = self._hold_s, HOLD_S
        call = self._actor.watch.remote(list(self._targets()), time.monotonic(), hold_s)
        view: MonitorView = await answer(call, within_s=hold_s + ANSWER_S, of="the HealthMonitor")
        return _on_this_clock(view)

    def _take(self, view: MonitorView) -> None:
        if _verdicts(view) != _verdicts(self._view):
            self._changed.set()
        self._view, self._turned_at, self.silent_s = view, time.monotonic(), 0.0

    def _note_silence(self) -> None:
        now = time.monotonic()
        self.silent_s += min(max(now - self._turned_at, 0.0), LONGEST_TURN_S)
        self._turned_at = now
        if self._probe.unanswered * (HOLD_S + ANSWER_S) >= self._hung_after_s * (1 if self._view is not None else 4):
            self._view, self._probe.unanswered = None, 0
            self._hung()
            self._probe.tasks.start(asyncio.to_thread(ray.kill, self._actor, no_restart=False))

    async def close(self) -> None:
        await self._probe.close()


def _on_this_clock(view: MonitorView) -> MonitorView:
    if view.at is None or view.incident is None or not (shift := clock_shift(view.at, time.monotonic())):
        return view
    return replace(view, incident=replace(view.incident, since=view.incident.since + shift))


def _verdicts(view: MonitorView | None) -> object:
    """The part of a view whose change calls for a plan at once."""
    if view is None:
        return None
    servers = tuple((s.name, s.generation, s.verdict.health, bool(s.doubt)) for s in view.servers)
    return servers, view.incident and view.incident.cause


class WatchedServers:
    """The servers that the HealthMonitor is to watch now, each with the long task that it was given.

    A server that starts has its own deadline; one that is sent weights owes nobody a token until it has them, for
    `load_s` at most: one that was given up after all that time is stuck. One that merely waits for weights (its trainer
    starts, a disk is full) answers as any other.
    """

    def __init__(self, slots: Mapping[str, ServerHandle], *, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._ordered: set[str] = set()
        self._loading_since: dict[str, float] = {}

    @contextlib.contextmanager
    def loads(self, name: str) -> Iterator[None]:
        """Inside the block it is sent weights by order of the Coordinator: the deadline begins anew."""
        self._loading_since[name] = time.monotonic()
        self._ordered.add(name)
        try:
            yield
        finally:
            self._ordered.discard(name)

    def targets(self, view: TrainerView) -> list[Watched]:
        in_pool = {(info.name, info.generation): info for info in view.servers}
        targets = []
        for name, slot in self._slots.items():
            known = in_pool.get((name, slot.generation))
            is_loading = name in self._ordered or _is_sent(known, view) or self._is_stuck(known)
            if not (slot.serves and is_loading):
                self._loading_since.pop(name, None)
            if slot.info is not None and slot.serves:
                task = self._task(name) if is_loading else None
                targets.append(Watched(server=slot.info, waiting=view.in_flight.get(name, 0), task=task))
        return targets

    def _is_stuck(self, known: ServerInfo | None) -> bool:
        """Its load took all its time, and it has nothing newer."""
        if known is None or known.state is not ServerState.STALE or known.name not in self._loading_since:
            return False
        return time.monotonic() - self._loading_since[known.name] >= self._load_s - LATE_S

    def _task(self, name: str) -> Task:
        since = self._loading_since.setdefault(name, time.monotonic())
        return Task(name="loading weights", since=since, deadline_s=self._load_s)


def _is_sent(known: ServerInfo | None, view: TrainerView) -> bool:
    """The trainer sends it weights by itself."""
    if known is None:
        return False
    return known.name in view.loading or (view.phase == "publish" and known.weight_version != view.policy_version)
