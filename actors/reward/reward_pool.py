"""Scores completions with the reward function in separate processes, with a time limit for each completion.

    score ─► queue ─► _serve ─► UserProcess     as many of both as reward.workers
                      killed and replaced when a completion takes longer than reward.timeout, replaced when it has grown
                      by more than reward.max_growth_gb

A group is sent in one message and answered line by line, so the limit applies to each completion, and one that hangs
costs the others neither rewards nor time. `Score.error` is the reason why there is no reward.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from actors.processes.loop_thread import LoopThread
from actors.reward.user_process import ProcessGone, UserProcess, UserProcesses
from launcher.base.errors import RewardError, RewardImportError
from launcher.base.wording import counted
from launcher.config.data import RewardConfig

T = TypeVar("T")

TRIES = 2
"""A process may be killed from outside; one that dies twice on the same item died of it."""

ASYNC_GRACE_S = 1.0
"""An async function's process keeps the time limit itself; it is killed where it does not."""

Item = Mapping[str, object]
"""One completion, as arguments of the reward function."""

SHOWN_CHARS = 60
"""Of a completion in a message."""

log = logging.getLogger("reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A completion's reward; None where it could not be scored, and then `error` is the reason.

    `parts`: of several functions, or of one that answers a dict. `is_unanswered`: the function answered None, and asks
    for another completion. `is_no_reward`: it answered what can't be a reward, such as a text. `is_late`: it took too
    long.
    """

    value: float | None
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    is_unanswered: bool = False
    is_no_reward: bool = field(default=False, compare=False)  # `error` is compared, and says it in words
    is_late: bool = field(default=False, compare=False)


class Scorable(Protocol):
    """A `Prompt`, or a data set's `Record`."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> Mapping[str, object]: ...

    @property
    def answer(self) -> object: ...

    @property
    def dataset(self) -> str: ...


class Generated(Protocol):
    """A `Completion`."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What is done with the process at a place."""

    work: Callable[[int], Coroutine[Any, Any, Any]]
    result: asyncio.Future[Any]


class RewardPool:
    """Its processes start with it and are warm by the time they are needed. Usable from any thread and loop."""

    def __init__(
        self,
        config: RewardConfig,
        own: Mapping[str, str] = MappingProxyType({}),
        *,
        thread: LoopThread | None = None,
    ) -> None:
        """`own`: the functions of data sets that have another than `config.fn`, by the data set's name. `thread`: where
        the processes are spoken to, one of its own by default; a score that is asked for there takes least. Raises
        RewardError where no process can be started."""
        self._config = config
        self._is_lent = thread is not None
        self._thread = thread or LoopThread("reward")
        self._own = {
            name: RewardPool(replace(config, fn=fn, weights=[]), thread=self._thread) for name, fn in own.items()
        }
        self._is_closed = False
        self._submitting = threading.Lock()  # work submitted once the loop has stopped would never be answered
        self._submitted: set[Future[Any]] = set()
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        self._serving: list[asyncio.Task[None]] = []
        self._processes = self._thread.call(self._start())

    async def score(
        self,
        completions: Sequence[str],
        prompt: Scorable,
        *,
        whole_or_none: bool = False,
        made: Sequence[Generated] = (),
        group: Sequence[str] = (),
    ) -> list[Score]:
        """One score for each completion, in order. Raises RewardImportError and RewardError where no process can score.

        `whole_or_none`: after the first that takes too long the rest is not tried, so a function that never returns
        is found out after one time limit, not after one for each sample. `made`: tokens and end of each completion.
        `group`: all texts of the prompt, where `completions` are only some. They are divided among the processes.
        """
        if (own := self.of(prompt.dataset)) is not self:
            return await own.score(completions, prompt, whole_or_none=whole_or_none, made=made, group=group)
        items = _items(completions, prompt, made, group or completions)
        work = self._divide(items, whole_or_none=whole_or_none)
        return await (work if self._thread.is_here() else asyncio.wrap_future(self._submit(work)))

    @property
    def fn(self) -> str:
        """The name of its function, or of several, as the setting has it."""
        return self._config.fn

    def of(self, dataset: str) -> RewardPool:
        """What scores the prompts of a data set."""
        return self._own.get(dataset, self)

    def find_bad_answers(self, answers: Sequence[object]) -> dict[int, str]:
        """By its place, why an answer is none that the reward function can compare with. Raises RewardImportError."""
        return self._submit(self._queue(partial(self._find_bad_answers, list(answers)))).result()

    def check(self, prompt: Scorable) -> float | None:
        """The reward of the prompt's own answer, as a check before the first step. Raises RewardImportError."""
        answer = "" if prompt.answer is None else str(prompt.answer)
        (score,) = self._submit(self._divide(_items([answer], prompt, (), [answer]))).result()
        if score.value is None and not score.is_unanswered:
            where = getattr(prompt, "where", "") or f"prompt {prompt.id}"  # a DataRecord's file and line
            raise RewardImportError(
                f"reward.fn={self._config.fn!r} can't score the answer of {where} itself: {score.error}",
                "repair the function, or change reward.fn, reward.timeout or the data set",
            )
        return score.value

    def close(self) -> None:
        """Kill the processes; callers that wait for a score get RewardError."""
        for own in self._own.values():
            own.close()
        with self._submitting:
            if self._is_closed:
                return
            self._is_closed = True
        self._thread.call(self._end())
        wait(self._submitted)  # each has got its RewardError before the loop stops
        if not self._is_lent:
            self._thread.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._submitting:
            if self._is_closed:
                work.close()
                raise _closed()
            submitted = self._thread.submit(work)
            self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    async def _divide(self, items: Sequence[Item], *, whole_or_none: bool = False) -> list[Score]:
        share = -(-len(items) // self._config.workers) or 1
        parts = [items[start : start + share] for start in range(0, len(items), share)]
        jobs = [self._queue(partial(self._score, part, whole_or_none=whole_or_none)) for part in parts]
        return [score for scores in await asyncio.gather(*jobs) for score in scores]

    async def _queue(self, work: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Whoever cancels it while it waits takes it out of the queue; what has begun goes on to its end."""
        if self._is_closed:
            raise _closed()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(Job(work=work, result=result))
        return await result

    async def _start(self) -> UserProcesses:
        config = self._config
        self._serving = [asyncio.create_task(self._serve(place)) for place in range(config.workers)]
        return UserProcesses(lambda: UserProcess(config), config.workers, most_growth_gb=config.max_growth_gb)

    async def _end(self) -> None:
        for _ in self._serving:
            self._jobs.put_nowait(None)  # after all jobs, which are answered that the pool was closed
        await self._processes.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, place: int) -> None:
        while (job := await self._jobs.get()) is not None:
            if job.result.done():
                continue  # cancelled
            try:
                done = await job.work(place)
                if not job.result.done():
                    job.result.set_result(done)
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
                if not job.result.done():
                    job.result.set_exception(error)

    async def _find_bad_answers(self, answers: list[object], place: int) -> dict[int, str]:
        process = await self._warm(place)
        asked = process.ask({"answers": answers}, within_s=self._config.setup_timeout)
        try:
            await asked.done
        except (TimeoutError, ProcessGone) as error:
            what = f"reward.fn={self._config.fn!r}: check_answer did not answer: {error or 'reward.setup_timeout'}"
            self._replace(place, what)
            raise RewardImportError(what, "it gets an answer and returns the problem, or an empty text") from error
        return dict(asked.answers[0]["problems"])

    async def _score(self, items: Sequence[Item], place: int, *, whole_or_none: bool = False) -> list[Score]:
        scores: list[Score] = []
        deaths = Counter[int]()  # by item
        while len(scores) < len(items):
            process = await self._warm(place)
            try:
                await self._score_rest(process, items, scores)
            except TimeoutError:
                reason = f"took longer than reward.timeout={self._config.timeout:g} s"
                reason += self._blame(process, items[len(scores)])
                late = Score(value=None, error=reason, is_late=True)
                scores += [late] * (len(items) - len(scores) if whole_or_none else 1)
                self._replace(place, reason)
            except ProcessGone as death:
                at = len(scores)
                deaths[at] += 1
                reason = f"the scoring process ended {counted(deaths[at], 'time')}: {death}"
                reason += self._blame(process, items[at])
                if deaths[at] == TRIES:
                    scores.append(Score(value=None, error=reason))
                self._replace(place, reason)
        self._renew(place)  # it may have grown
        return scores

    async def _score_rest(self, process: UserProcess, items: Sequence[Item], scores: list[Score]) -> None:
        """Append the process's answers to `scores`. Raises TimeoutError and ProcessGone for the next item."""
        rest = items[len(scores) :]
        limit = self._config.timeout + (ASYNC_GRACE_S if process.is_async else 0.0)
        asked = process.ask({"items": rest}, len(rest), within_s=limit)
        try:
            await asked.done
        finally:
            scores += [
                Score(
                    value=answer.get("value"),
                    error=answer.get("error", ""),
                    parts=answer.get("parts", {}),
                    is_unanswered=answer.get("unanswered", False),
                    is_no_reward=answer.get("no_reward", False),
                    is_late=answer.get("late", False),
                )
                for answer in asked.answers
            ]

    async def _warm(self, place: int) -> UserProcess:
        if self._is_closed:
            raise _closed()
        try:
            return await self._processes.ready_at(place)
        except RewardImportError:
            self._processes.kill(place)  # the next job imports it again, and gets the same error
            if self._is_closed:
                raise _closed() from None
            raise

    def _blame(self, process: UserProcess, item: Item) -> str:
        """Whose code it was, and what it was given: of `async` functions, which are at several, that is not known."""
        given = "" if process.is_async else f", the completion {str(item['completion'])[:SHOWN_CHARS]!r}"
        return f" ({self._config.fn}{given})"

    def _replace(self, place: int, reason: str) -> None:
        if self._is_closed:
            raise _closed()
        log.warning("reward.process_replaced reason=%r", reason)
        self._processes.kill(place)
        self._renew(place)

    def _renew(self, place: int) -> None:
        """So that it is warm by the next item, which meets it again, and raises, where no process can be started."""
        if not self._is_closed:
            with suppress(RewardError):
                self._processes.at(place)


def _items(completions: Sequence[str], prompt: Scorable, made: Sequence[Generated], group: Sequence[str]) -> list[Item]:
    known = {"answer": prompt.answer, "prompt_id": prompt.id, "record": dict(prompt.record), "group": list(group)}
    ends = [(list(one.token_ids), one.finish_reason) for one in made] or [([], "stop")] * len(completions)
    return [
        {"completion": completion, "token_ids": token_ids, "finish_reason": finish, **known}
        for completion, (token_ids, finish) in zip(completions, ends, strict=True)
    ]


def _closed() -> RewardError:
    return RewardError("the reward pool was closed")
