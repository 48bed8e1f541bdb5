"""The Coordinator's handle of the HealthMonitor: sends it what the servers have to do, and gives each server's report
to its handle. It answers when a report changes, or after a second.

A monitor that hangs or restarts delays nobody: its verdicts grow old and are dropped, and unknown is never a reason to
kill (P7). One that was restarted learns the servers from the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from actors.cluster.actor_calls import ActorProbe, Silence, answer
from actors.monitoring.health_monitor import MonitorReport
from actors.serving.server_report import ServerReport, ServerWork
from launcher.base.errors import LauncherError
from launcher.base.messages import Incident, Verdict
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.reward_health import LowerLevel

ANSWER_S = 2.0
HOLD_S = 1.0
LOOK_S = 0.05
FRESH_S = 5.0


class MonitorHandle:
    """`work`: of the servers to watch, now. `heard` gets each server's report. `changed` is set when a report changes.

    `hung` is called when the monitor's process is ended because it answers nobody: a stopped process is alive to Ray,
    and the trainer would wait at the gate for ever. `hung_after_s` is counted in unanswered questions of ANSWER_S each,
    so that a pause of the Coordinator's own is not taken for the monitor's; one that never answered gets more time, it
    may be starting.
    """

    def __init__(
        self,
        actor: Any,
        *,
        work: Callable[[], Mapping[str, ServerWork]],
        heard: Callable[[str, ServerReport], None] = lambda name, report: None,
        changed: asyncio.Event,
        hung_after_s: float,
        hung: Callable[[], None] = lambda: None,
    ) -> None:
        self._actor = actor
        self._hung = hung
        self._hung_after_s = hung_after_s
        self._silence = Silence()
        self._work = work
        self._heard = heard
        self._changed = changed
        self._report: MonitorReport | None = None
        self._hold_s = HOLD_S
        self._probe = ActorProbe(self._ask, heard=self._take_report, missed=self._note_silence)

    @property
    def incident(self) -> Incident | None:
        self._probe.tasks.check()
        report = self._fresh()
        return None if report is None else report.incident

    @property
    def lower_level(self) -> LowerLevel | None:
        report = self._fresh()
        return None if report is None else report.lower_level

    @property
    def is_heard(self) -> bool:
        """It has answered lately: that it names no incident says that there is none."""
        return self._fresh() is not None

    @property
    def silent_s(self) -> float:
        """For how long it has been asked in vain."""
        return self._silence.seconds

    @property
    def error(self) -> str:
        """Why the last question has no answer; "" where it has one."""
        return self._probe.error

    def verdict(self, name: str, generation: int) -> Verdict | None:
        """On one incarnation of one server; doubt of its weights is one too. None where nothing is known."""
        report = self._fresh()
        of_server = None if report is None else report.servers.get(name)
        return None if of_server is None or of_server.ordered != generation else of_server.verdict

    def _fresh(self) -> MonitorReport | None:
        return self._report if self._probe.is_fresh(FRESH_S) else None

    def begin_looking(self) -> None:
        self._silence.answered()  # what was before it was asked is no silence
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
        await answer(self._actor.watch.remote({}, 0.0), within_s=ANSWER_S, of="the HealthMonitor")

    async def _refresh_now(self) -> None:
        self._hold_s = 0.0
        await self._probe.refresh()

    async def _ask(self) -> MonitorReport:
        hold_s = self._hold_s
        self._hold_s = HOLD_S
        call = self._actor.watch.remote(dict(self._work()), hold_s)
        report: MonitorReport = await answer(call, within_s=hold_s + ANSWER_S, of="the HealthMonitor")
        return report

    def _take_report(self, report: MonitorReport) -> None:
        now = time.monotonic()
        if report.incident is not None:
            report = replace(report, incident=replace(report.incident, since=now - report.incident_age_s))
        if _what_calls_for_a_plan(report) != _what_calls_for_a_plan(self._report):
            self._changed.set()
        self._report = report
        self._silence.answered()
        for name, one in report.servers.items():
            self._heard(name, one)

    def _note_silence(self) -> None:
        self._silence.missed()
        if self._probe.unanswered * (HOLD_S + ANSWER_S) >= self._hung_after_s * (1 if self._report is not None else 4):
            self._report = None
            self._probe.unanswered = 0
            self._hung()
            self._probe.tasks.start(asyncio.to_thread(ray.kill, self._actor, no_restart=False))

    async def close(self) -> None:
        await self._probe.close()


def _what_calls_for_a_plan(report: MonitorReport | None) -> object:
    """The part of a report whose change calls for one at once."""
    if report is None:
        return None
    servers = {
        name: (one.ordered, one.info, one.verdict and one.verdict.health) for name, one in report.servers.items()
    }
    return servers, report.incident and report.incident.cause, report.lower_level
