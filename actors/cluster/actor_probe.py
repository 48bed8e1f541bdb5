"""Asks an actor periodically, and keeps its last answer with its age."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from actors.processes.background_tasks import BackgroundTasks
from launcher.base.errors import LauncherError

T = TypeVar("T")


class ActorProbe(Generic[T]):
    """`ask` makes one call with its own deadline (actors/cluster/actor_calls.py). `heard` is called with each
    new answer, `missed` after each question that got none. `unanswered`: deadlines that have passed since the last
    answer; a process that is stopped is alive to Ray.

    An answer that arrives after the answer to a later question is dropped.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        *,
        heard: Callable[[T], None] = lambda answer: None,
        missed: Callable[[], None] = lambda: None,
    ) -> None:
        self.answered_at = float("-inf")
        self.error = ""
        """Why the last question has no answer; "" where it has one."""
        self.unanswered = 0
        self.tasks = BackgroundTasks()
        self._ask = ask
        self._heard = heard
        self._missed = missed
        self._last_asked, self._last_answered = 0, 0

    @property
    def is_waiting(self) -> bool:
        """A question has been asked since the last answer came."""
        return self._last_asked > self._last_answered

    def is_fresh(self, within_s: float) -> bool:
        return time.monotonic() - self.answered_at <= within_s

    async def refresh(self) -> None:
        """Ask once. Raises nothing for an actor that does not answer: `error` is the reason."""
        self._last_asked += 1
        number = self._last_asked
        try:
            answer = await self._ask()
        except LauncherError as error:
            self.error = error.message
            self.unanswered += isinstance(error.__cause__, TimeoutError)
            self._missed()
            return
        if number > self._last_answered:
            self._last_answered, self.answered_at, self.error, self.unanswered = number, time.monotonic(), "", 0
            self._heard(answer)

    def begin(self, interval_s: Callable[[], float]) -> None:
        """Ask again and again, with `interval_s` between an answer and the next question."""
        self.tasks.start(self._refresh_always(interval_s))

    async def _refresh_always(self, interval_s: Callable[[], float]) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(interval_s())

    async def close(self) -> None:
        await self.tasks.close()
