"""Scores completions with the reward function in separate processes, with a time limit for each completion.

    score ─► queue ─► RewardScorer thread ─► RewardProcess     as many of both as reward.workers
                      takes a group          killed and replaced when a completion takes longer than reward.timeout,
                                             replaced when it has grown by more than reward.max_growth_gb

A group is sent in one message and answered line by line, so the limit applies to each completion, and one that hangs
costs the others neither rewards nor time. `Score.error` is the reason why there is no reward.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from actors.reward.reward_process import ProcessGone, RewardProcess
from launcher.base.errors import RewardError, RewardImportError
from launcher.config.data import RewardConfig

TRIES = 2
"""A process may be killed from outside; one that dies twice on the same item died of it."""

ASYNC_GRACE_S = 1.0
"""An async function's process keeps the time limit itself; it is killed where it does not."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt's completions, as arguments of the reward function (`whole_or_none`: see `score`), or the answers of a
    data set that are to be checked."""

    items: list[dict[str, object]] = field(default_factory=list)
    whole_or_none: bool = False
    answers: list[object] | None = None
    result: Future[Any] = field(default_factory=Future)


class RewardPool:
    """Its processes start with it and are warm by the time they are needed. Usable from any thread and loop."""

    def __init__(self, config: RewardConfig, own: Mapping[str, str] = MappingProxyType({})) -> None:
        """`own`: the functions of data sets that have another than `config.fn`, by the data set's name."""
        self._own = {name: RewardPool(replace(config, fn=fn, weights=[])) for name, fn in own.items()}
        self._config = config
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._submitting = threading.Lock()  # a job put in after the queue was emptied would never be answered
        self._scorers = [RewardScorer(config, self._jobs, self._closed, index) for index in range(config.workers)]

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
        share = -(-len(items) // self._config.workers)
        parts = [items[start : start + share] for start in range(0, len(items), share)] if items else []
        jobs = [self._submit(Job(items=part, whole_or_none=whole_or_none)) for part in parts]
        return [score for scores in await asyncio.gather(*map(asyncio.wrap_future, jobs)) for score in scores]

    def of(self, dataset: str) -> RewardPool:
        """What scores the prompts of a data set."""
        return self._own.get(dataset, self)

    def find_bad_answers(self, answers: Sequence[object]) -> dict[int, str]:
        """By its place, why an answer is none that the reward function can compare with. Raises RewardImportError."""
        found: dict[int, str] = self._submit(Job(answers=list(answers))).result()
        return found

    def check(self, prompt: Scorable) -> float | None:
        """The reward of the prompt's own answer, as a check before the first step. Raises RewardImportError."""
        answer = "" if prompt.answer is None else str(prompt.answer)
        scores: list[Score] = self._submit(Job(items=_items([answer], prompt, (), [answer]))).result()
        (score,) = scores
        if score.value is None and not score.is_unanswered:
            where = getattr(prompt, "where", "") or f"prompt {prompt.id}"  # a DataRecord's file and line
            raise RewardImportError(
                f"reward.fn={self._config.fn!r} can't score the answer of {where} itself: {score.error}",
                "repair the function, or change reward.fn, reward.timeout or the data set",
            )
        return score.value

    def _submit(self, job: Job) -> Future[Any]:
        with self._submitting:
            if self._closed.is_set():
                raise _closed()
            self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """Kill the processes; callers that wait for a score get RewardError."""
        for own in self._own.values():
            own.close()
        with self._submitting:
            self._closed.set()
        for _ in self._scorers:
            self._jobs.put(None)
        for scorer in self._scorers:
            scorer.close()
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None and job.result.set_running_or_notify_cancel():
                job.result.set_exception(_closed())

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RewardScorer:
    """A thread and its process. The thread starts the process and lasts as long as the pool: the kernel ends a process
    whose starting thread ends (PR_SET_PDEATHSIG)."""

    def __init__(
        self, config: RewardConfig, jobs: queue.SimpleQueue[Job | None], closed: threading.Event, index: int
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._closed = closed
        self._process: RewardProcess | None = None
        self._lock = threading.Lock()  # between starting a process and closing
        self._thread = threading.Thread(target=self._run, name=f"reward-{index}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """`closed` has been set, and a None is in the queue."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        self._start_early()
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                if job.answers is None:
                    job.result.set_result(self._score(job.items, whole_or_none=job.whole_or_none))
                else:
                    job.result.set_result(self._find_bad_answers(job.answers))
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
                job.result.set_exception(error)
            self._replace_if_grown()
        self._bury()

    def _find_bad_answers(self, answers: list[object]) -> dict[int, str]:
        process, deadline = self._warm(), time.monotonic() + self._config.setup_timeout
        try:
            process.send({"answers": answers}, deadline)
            return dict(process.receive(deadline)["problems"])
        except (TimeoutError, ProcessGone) as error:
            self._replace(str(error))
            what = f"reward.fn={self._config.fn!r}: check_answer did not answer: {error or 'reward.setup_timeout'}"
            raise RewardImportError(what, "it gets an answer and returns the problem, or an empty text") from error

    def _score(self, items: Sequence[dict[str, object]], *, whole_or_none: bool) -> list[Score]:
        scores: list[Score] = []
        deaths = Counter[int]()  # by item
        while len(scores) < len(items):
            try:
                self._score_rest(self._warm(), items, scores)
            except TimeoutError:
                reason = f"took longer than reward.timeout={self._config.timeout:g} s"
                scores.append(Score(value=None, error=reason, is_late=True))
                self._replace(reason)
                if whole_or_none:
                    return [*scores, *[Score(value=None, error=reason, is_late=True)] * (len(items) - len(scores))]
            except ProcessGone as death:
                deaths[len(scores)] += 1
                if deaths[len(scores)] == TRIES:
                    scores.append(Score(value=None, error=f"the scoring process ended {TRIES} times: {death}"))
                self._replace(str(death))
        return scores

    def _score_rest(self, process: RewardProcess, items: Sequence[dict[str, object]], scores: list[Score]) -> None:
        """Append the process's answers to `scores`. Raises TimeoutError and ProcessGone for the next item."""
        process.send(items[len(scores) :], time.monotonic() + self._config.timeout)
        while len(scores) < len(items):
            limit = self._config.timeout + (ASYNC_GRACE_S if process.is_async else 0.0)
            answer = process.receive(time.monotonic() + limit)
            scores.append(
                Score(
                    value=answer.get("value"),
                    error=answer.get("error", ""),
                    parts=answer.get("parts", {}),
                    is_unanswered=answer.get("unanswered", False),
                    is_no_reward=answer.get("no_reward", False),
                    is_late=answer.get("late", False),
                )
            )

    def _warm(self) -> RewardProcess:
        process = self._process or self._start()
        try:
            process.wait_ready()
        except RewardImportError:
            self._bury()  # the next job imports it again, and gets the same error
            raise
        return process

    def _replace(self, reason: str) -> None:
        log.warning("reward.process_replaced reason=%r", reason)
        self._bury()
        self._start_early()

    def _replace_if_grown(self) -> None:
        """Its answers are out, so that none is lost; what the function has kept goes with the process."""
        most, process = self._config.max_growth_gb, self._process
        if most is None or process is None:
            return
        if (grown := process.grown_gb()) > most:
            what = f"reward.fn={self._config.fn!r} has grown by {grown:.1f} GB since its first completions"
            self._replace(f"{what}, more than reward.max_growth_gb={most:g}")

    def _start_early(self) -> None:
        """So that it is warm by the next item; a failure is met again, and raised, by that item."""
        with suppress(RewardError):
            self._start()

    def _start(self) -> RewardProcess:
        with self._lock:
            if self._closed.is_set():
                raise _closed()
            try:
                self._process = RewardProcess(self._config)
            except OSError as error:
                raise RewardError(f"no process for the reward function can be started: {error}", "") from error
            return self._process

    def _bury(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.bury()


def _items(
    completions: Sequence[str], prompt: Scorable, made: Sequence[Generated], group: Sequence[str]
) -> list[dict[str, object]]:
    known = {"answer": prompt.answer, "prompt_id": prompt.id, "record": dict(prompt.record), "group": list(group)}
    ends = [(list(one.token_ids), one.finish_reason) for one in made] or [([], "stop")] * len(completions)
    return [
        {"completion": completion, "token_ids": token_ids, "finish_reason": finish, **known}
        for completion, (token_ids, finish) in zip(completions, ends, strict=True)
    ]


def _closed() -> RewardError:
    return RewardError("the reward pool was closed")
