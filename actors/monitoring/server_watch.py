"""Watches one incarnation of one server: reads its state, probes it, and keeps the verdict.

    every look_interval_s:  /proc states, CPU, tokens ─► ServerLook ─► ServerEvidence ─► Verdict   (sooner when stopped)
    in the background:      one-token generations; /metrics where the tokens can't be read here; /health when in doubt

A look never waits for an answer, so neither a dead server nor a slow one delays its verdict. The policy is
launcher/policy/liveness.py; the exit itself is seen sooner by the watch on the process (actors/supervision).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from actors.monitoring.generation_probe import GenerationProbe
from actors.processes.process_tree import identify
from actors.serving.remote_process_probe import ProcessTreeView, RemoteProcessTree
from actors.serving.server_processes import TOKENS, ServerProcesses
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed
from launcher.base.messages import Cause, Health, ServerInfo, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.liveness import judge_server
from launcher.policy.observation_history import ServerEvidence, ServerLook, Task, observe

SOONER = 0.2
"""Of a look interval, between looks at a process that is stopped."""


class ServerWatch:
    """`run` until cancelled. `server` must have its pid and url; another incarnation needs another watch.

    `on_change` is called with a verdict whose health or cause differs from the one before.
    """

    def __init__(
        self,
        server: ServerInfo,
        settings: HealthConfig,
        client: SGLangClient,
        *,
        on_change: Callable[[ServerInfo, Verdict], None] = lambda server, verdict: None,
        clock: Callable[[], float] = time.monotonic,
        far: RemoteProcessTree | None = None,
    ) -> None:
        """`far`: its processes, where they are on another node."""
        self.server = server
        self._settings = settings
        self._client = client
        self._on_change = on_change
        self._clock = clock
        process = identify(server.pid) if server.pid is not None and far is None else None
        self._far = far
        self._tree: ProcessTreeView | None = far if process is None else ServerProcesses(process)
        self._probe = GenerationProbe(server.url, client, settings, clock)
        self._evidence: ServerEvidence | None = None
        self._verdict: Verdict | None = None
        self._waiting = 0
        self._target_at = clock()
        self._task: Task | None = None
        self._metrics = BackgroundCall()
        self._metered: int | None = None
        self._health = BackgroundCall()
        self._health_status: int | None = None

    def update_target(self, *, waiting: int, task: Task | None) -> None:
        """How many requests of clients it has, and what long task it was given. It counts for `proof_s`."""
        self._waiting, self._task, self._target_at = waiting, task, self._clock()

    def verdict(self) -> Verdict:
        """On what was seen so far, as of now."""
        if self._tree is None or self._tree.is_gone():
            return Verdict(
                health=Health.DEAD, reason=f"its process {self.server.pid} is gone", cause=Cause.SERVER_CRASH
            )
        return judge_server(self._evidence, self._settings, self._clock())

    def pids(self) -> dict[str, int]:
        """By role, of its living processes as last seen."""
        return {} if self._tree is None else self._tree.pids()

    async def run(self) -> None:
        try:
            while True:
                self.look()
                is_stopped = self._evidence is not None and self._evidence.look.has_stopped
                await asyncio.sleep(self._settings.look_interval_s * (SOONER if is_stopped else 1))
        finally:
            if self._far is not None:
                await self._far.close()
            await self._probe.close()
            await self._metrics.close()
            await self._health.close()

    def look(self) -> None:
        """One look, and the probes that are due after it."""
        now = self._clock()
        is_recent = now - self._target_at <= self._settings.proof_s
        look = ServerLook(
            at=now,
            processes=None if self._tree is None else self._tree.look(),
            probe_waits=self._probe.waits,
            answered_at=self._probe.answered_at,
            probe_failure=self._probe.failure,
            usual_answer_s=self._probe.usual_answer_s,
            waiting=self._waiting if is_recent else 0,
            tokens=self._tokens(),
            task=self._task if is_recent else None,
            health_status=self._health_status,
        )
        self._evidence = (
            ServerEvidence(look=look) if self._evidence is None else observe(self._evidence, look, self._settings)
        )
        verdict = self.verdict()
        if verdict.health is Health.DEAD:  # while it is ended, none of it may be stopped any more
            self._evidence = replace(self._evidence, dead_at=now)
        self._report_change(verdict)
        if self._task is None or not is_recent:  # a server at a task owes no answer, and a load would abort the probe
            self._probe.send_if_due(makes_tokens=self._makes_tokens(now))
        self._ask_when_in_doubt()

    def _makes_tokens(self, now: float) -> bool:
        """It has just now, and all of its processes run: then a probe would show what is known, at the step's cost."""
        seen = self._evidence
        if seen is None or seen.token_at is None or seen.stopped_s > 0:
            return False
        return now - seen.token_at <= self._settings.probe_interval_s

    def _tokens(self) -> int | None:
        seen = None if self._tree is None else self._tree.tokens()
        if seen is not None:
            return seen
        self._metrics.start_if_due(self._read_metrics, self._clock(), self._settings.probe_interval_s)
        return self._metered

    async def _read_metrics(self) -> None:
        try:
            series = await self._client.metrics(self.server.url, timeout_s=self._settings.silence_s)
        except RequestFailed:
            self._metered = None  # not seen is not the same as none made
            return
        self._metered = int(series[TOKENS]) if TOKENS in series else None

    def _ask_when_in_doubt(self) -> None:
        """For people alone. SGLang may generate for it, so a server that answers is not asked."""
        if self._verdict is None or self._verdict.health in (Health.HEALTHY, Health.UNKNOWN):
            self._health_status = None
            return
        self._health.start_if_due(self._read_health, self._clock(), self._settings.silence_s)

    async def _read_health(self) -> None:
        try:
            good = await self._client.health(self.server.url, timeout_s=self._settings.silence_s)
        except RequestFailed:
            self._health_status = None
            return
        self._health_status = 200 if good else 503

    def _report_change(self, verdict: Verdict) -> None:
        before, self._verdict = self._verdict, verdict
        if before is None or (before.health, before.cause) != (verdict.health, verdict.cause):
            self._on_change(self.server, verdict)


class BackgroundCall:
    """One call at a time in the background, at most every so many seconds."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._asked_at: float | None = None

    def start_if_due(self, ask: Callable[[], Coroutine[Any, Any, None]], now: float, interval_s: float) -> None:
        busy = self._task is not None and not self._task.done()
        if busy or (self._asked_at is not None and now - self._asked_at < interval_s):
            return
        self._asked_at = now
        self._task = asyncio.create_task(ask())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
