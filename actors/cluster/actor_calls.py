"""Calls to actors that may be restarting, hung or gone: each has a deadline, and raises only our errors. `ActorProbe`
asks one periodically, and keeps its last answer with its age."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from ray.exceptions import RayError, RayTaskError

from actors.processes.background_tasks import BackgroundTasks
from launcher.base.errors import LauncherError, RunError

T = TypeVar("T")

LONGEST_TURN_S = 5.0
"""One turn's share of a silence: a longer one was a pause of the asking process itself."""


class ActorAway(RunError):
    """An actor did not answer: it is restarting, hangs, or is gone. Nothing is known of what it did."""


async def answer(call: Awaitable[Any], *, within_s: float, of: str) -> Any:
    """The value of one call. Raises what the actor raised, ActorAway where it raised nothing of its own."""
    try:
        async with asyncio.timeout(within_s):
            return await call
    except RayTaskError as error:
        if isinstance(error.cause, LauncherError):
            raise error.cause from None
        raise RunError(f"{of} failed: {error.cause!r}", "this is a defect; see the logs of its actor") from error
    except RayError as error:  # an actor that Ray ended for the machine's memory is no RayActorError
        raise ActorAway(f"{of} is not there: {str(error).partition(chr(10))[0] or type(error).__name__}") from error
    except TimeoutError as error:
        raise ActorAway(f"{of} did not answer within {within_s:g} s") from error


async def call_method(actor: Any, method: str, *arguments: Any, within_s: float, of: str) -> Any:
    """`answer` of a call of `method`. Ray refuses one that the actor's class does not take before it is sent, in the
    caller's process: without this it would pass for a defect of the caller."""
    try:
        call = getattr(actor, method).remote(*arguments)
    except (TypeError, AttributeError) as error:
        raise RunError(
            f"{of} failed: its class does not take this call of {method}: {error!r}", "this is a defect of that class"
        ) from error
    return await answer(call, within_s=within_s, of=of)


def as_ours(error: RayTaskError) -> LauncherError:
    """What ended the Coordinator, as the error that it raised."""
    if isinstance(error.cause, LauncherError):
        return error.cause
    return RunError(f"the Coordinator failed: {error.cause!r}", "this is a defect; events.jsonl says what it did last")


class Silence:
    """For how long an actor has been asked in vain: `seconds`, since its last answer. `answered` and `missed` of each
    question."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.answered()

    def answered(self) -> None:
        self.seconds = 0.0
        self._turned_at = self._clock()

    def missed(self) -> None:
        now = self._clock()
        self.seconds += min(now - self._turned_at, LONGEST_TURN_S)
        self._turned_at = now


class ActorProbe(Generic[T]):
    """`ask` makes one call with its own deadline (`answer`). `heard` is called with each
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
        self._last_asked = 0
        self._last_answered = 0

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
            self._last_answered = number
            self.answered_at = time.monotonic()
            self.error = ""
            self.unanswered = 0
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
