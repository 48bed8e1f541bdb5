"""Requests a real generation of one token from one server, periodically: only such an answer shows that it works.

Probes run side by side, each with its own deadline, and nobody waits for them: one that the server has lost (an
update of weights aborts all requests) must not delay the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from statistics import median

from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.errors import RequestFailed
from launcher.config.supervision import HealthConfig

PROMPT = (0,)
SAMPLING = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=1, min_new_tokens=1)
MOST_AT_ONCE = 3
ANSWERS_KEPT = 20


class GenerationProbe:
    """Call `send_if_due` at each observation. Times are the clock's; used on one asyncio loop."""

    def __init__(self, url: str, client: SGLangClient, settings: HealthConfig, clock: Callable[[], float]) -> None:
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
        return median(self._durations) if self._durations else None

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
            self._defect, self.waits = error, False

    async def _ask(self, asked_at: float) -> None:
        try:
            await self._client.generate(
                self._url, token_ids=PROMPT, sampling=SAMPLING, timeout_s=self._settings.silence_max_s
            )
        except RequestFailed as failure:
            self.failure = failure.message
            return
        self.answered_at = self._clock()
        self._durations.append(self.answered_at - asked_at)
        self.waits, self.failure = False, ""

    async def close(self) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
