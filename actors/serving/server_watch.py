"""Watches one incarnation of one server, in its actor: reads its state, probes it, and keeps the verdict.

    every look_interval_s:  /proc states, CPU, tokens ─► ServerLook ─► ServerEvidence ─► Verdict   (sooner when stopped)
    in the background:      one-token generations; /metrics where the tokens can't be read here; /health when in doubt

A look never waits for an answer, so neither a dead server nor a slow one delays its verdict. The policy is
launcher/policy/liveness.py; the exit itself is reported sooner by the server's host (actors/processes).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from actors.processes.background_tasks import BackgroundCall
from actors.processes.process_tree import identify
from actors.serving.server_processes import TOKENS, ServerProcesses
from actors.serving.server_report import ServerWork
from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.errors import RequestFailed
from launcher.base.messages import Cause, Health, ServerInfo, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.liveness import judge_server
from launcher.policy.observation_history import ServerEvidence, ServerLook, Task, observe

PROBE_PROMPT = (0,)
PROBE_SAMPLING = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=1, min_new_tokens=1)
MOST_AT_ONCE = 3
ANSWERS_KEPT = 20


class GenerationProbe:
    """Requests a real generation of one token from one server, periodically: only such an answer shows that it works.

    Probes run side by side, each with its own deadline, and nobody waits for them: one that the server has lost (an
    update of weights aborts all requests) must not delay the next. Call `send_if_due` at each observation. Times are
    the clock's; used on one asyncio loop.
    """

    def __init__(
        self,
        url: str,
        client: SGLangClient,
        settings: HealthConfig,
        clock: Callable[[], float],
        first_s: float | None = None,
    ) -> None:
        """`first_s`: what an answer took before, for as long as none of these has come."""
        self._first_s = first_s
        self._url = url
        self._client = client
        self._settings = settings
        self._clock = clock
        self._asked_at: float | None = None
        self._durations: deque[float] = deque(maxlen=ANSWERS_KEPT)
        self._running: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None
        self.waits = False
        """A generation has been requested since the last answer."""
        self.answered_at: float | None = None
        self.failure = ""
        """Of the last that failed since the last answer."""

    @property
    def usual_answer_s(self) -> float | None:
        return median(self._durations) if self._durations else self._first_s

    def send_if_due(self, *, makes_tokens: bool = False) -> None:
        """Every `probe_interval_s`; every `probe_busy_interval_s` while it makes tokens for others; while one waits,
        another only after `silence_s`. Raises the error that nobody expected of an earlier one."""
        if (defect := self._defect) is not None:
            self._defect = None
            raise defect
        now = self._clock()
        usual_s = self._settings.probe_busy_interval_s if makes_tokens else self._settings.probe_interval_s
        wait_s = self._settings.silence_s if self._running else usual_s
        if len(self._running) >= MOST_AT_ONCE or (self._asked_at is not None and now - self._asked_at < wait_s):
            return
        self._asked_at = now
        self.waits = True
        task = asyncio.create_task(self._ask(now))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A probe that failed by a defect of ours asked the server nothing: it must not count as unanswered."""
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error
            self.waits = False

    async def _ask(self, asked_at: float) -> None:
        try:
            await self._client.generate(
                self._url, token_ids=PROBE_PROMPT, sampling=PROBE_SAMPLING, timeout_s=self._settings.silence_max_s
            )
        except RequestFailed as failure:
            self.failure = failure.message
            return
        self.answered_at = self._clock()
        self._durations.append(self.answered_at - asked_at)
        self.waits = False
        self.failure = ""

    async def close(self) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


SOONER = 0.2
"""Of a look interval, between looks at a process that is stopped."""
REASON_S = 2.0
"""Longest wait for its host to report how a process that is gone has ended: the reason decides what is changed before
the next start. It comes within milliseconds, on a starved machine later."""


class ServerWatch:
    """`run` until cancelled. `server` must have its pid and url; another incarnation needs another watch.

    `changed` is called when the verdict has another health or cause than before. `blind`: why a look failed; the next
    ones go on.
    """

    def __init__(
        self,
        server: ServerInfo,
        settings: HealthConfig,
        client: SGLangClient,
        *,
        first_answer_s: float | None = None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_answer_s`: what its first generation took: a busy machine is slow from the first request on, when the
        server has no usual answer time yet, and was restarted for it."""
        self.server = server
        self.blind = ""
        self._settings = settings
        self._client = client
        self._changed = changed
        self._clock = clock
        process = identify(server.pid) if server.pid is not None else None
        self._tree = None if process is None else ServerProcesses(process)
        self._gone_at: float | None = None
        self._probe = GenerationProbe(server.url, client, settings, clock, first_answer_s)
        self._evidence: ServerEvidence | None = None
        self._verdict: Verdict | None = None
        self._waiting = 0
        self._work_at = clock()
        self._task: Task | None = None
        self._metrics = BackgroundCall()
        self._metered: int | None = None
        self._health = BackgroundCall()
        self._health_status: int | None = None

    def take_work(self, work: ServerWork) -> None:
        """What it has to do now. It counts for `proof_s`."""
        self._waiting = work.waiting
        self._work_at = self._clock()
        self._task = None
        if work.loading_s is not None:
            since = self._work_at - work.loading_s
            self._task = Task(name="loading weights", since=since, deadline_s=work.loading_limit_s)

    def verdict(self) -> Verdict:
        """On what was seen so far, as of now."""
        if self._tree is None or self._tree.is_gone():
            return self._verdict_when_gone()
        return judge_server(self._evidence, self._settings, self._clock())

    def _verdict_when_gone(self) -> Verdict:
        now, reason = self._clock(), f"its process {self.server.pid} is gone"
        self._gone_at = now if self._gone_at is None else self._gone_at
        if now - self._gone_at < REASON_S:
            return Verdict(health=Health.SUSPECT, reason=reason)
        return Verdict(health=Health.DEAD, reason=reason, cause=Cause.SERVER_CRASH)

    def pids(self) -> dict[str, int]:
        """By role, of its living processes as last seen."""
        return {} if self._tree is None else self._tree.pids()

    async def run(self) -> None:
        try:
            while True:
                try:
                    self.look_at_server()
                except Exception as error:  # noqa: BLE001 - whatever it is: without a next look nobody would see a hang
                    self.blind = repr(error)
                is_stopped = self._evidence is not None and self._evidence.look.has_stopped
                await asyncio.sleep(self._settings.look_interval_s * (SOONER if is_stopped else 1))
        finally:
            await self._probe.close()
            await self._metrics.close()
            await self._health.close()

    def look_at_server(self) -> None:
        """One look, and the probes that are due after it."""
        now = self._clock()
        is_recent = now - self._work_at <= self._settings.proof_s
        look = ServerLook(
            at=now,
            processes=None if self._tree is None else self._tree.look_at_processes(),
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
        before = self._verdict
        self._verdict = verdict
        if before is None or (before.health, before.cause) != (verdict.health, verdict.cause):
            self._changed()
