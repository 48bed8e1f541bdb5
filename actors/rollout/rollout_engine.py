"""Prompts in, scored groups of completions out, through whichever servers are READY.

The samples of a prompt are one request, and each arrives as it is made. One that is moved goes on at another server
from the last token that arrived (request_loop.py). One that fails is retried with exponential backoff and jitter for
what is missing, at another server where the first completed nothing, and waits while there is none. What fails in the
end has no reward: its prompt returns to the queue and is generated again. A reward of 0 is only ever the reward
function's own answer (P1).

Completions are scored as their group finishes, while the others are still being generated.

All of that goes on on one asyncio loop, which holds the client, the pool and the reward workers. `LiveRollouts` is the
step loop's side of it, on another thread: `collect` and `evaluate` wait for the loop, and `stop` cancels them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from actors.data.prompt_queue import PromptQueue
from actors.episodes.episode import EpisodeFailed
from actors.episodes.episode_runner import EpisodeRunner
from actors.processes.loop_thread import LoopThread
from actors.reward.reward_pool import Score
from actors.rollout.request_loop import GroupProgress, GroupRequest, RequestLoop, Told, request_attempts
from actors.rollout.rollout_stream import GroupFailed, RolloutStream, Tally, Weights
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from launcher.base.messages import EvalReport
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup, mean_of
from launcher.config.schema import RolloutConfig, RunConfig

log = logging.getLogger("rollouts")

T = TypeVar("T")


class RolloutScorer(Protocol):
    """Scores the completions of one prompt (a RewardPool)."""

    async def score(
        self,
        completions: Sequence[str],
        prompt: Prompt,
        *,
        whole_or_none: bool = False,
        made: Sequence[Completion] = (),
        group: Sequence[str] = (),
    ) -> list[Score]: ...


class RolloutEngine:
    """Used on one asyncio loop. `decode` turns token ids into text. `episodes`: who plays each sample, where it is more
    than one answer."""

    def __init__(
        self,
        *,
        client: SGLangClient,
        pool: ServerPool,
        scorer: RolloutScorer,
        config: RolloutConfig,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        episodes: EpisodeRunner | None = None,
        told: Told = lambda event, server, reason: None,
    ) -> None:
        """`told`: of servers whose requests were moved, as they were silent."""
        self._loop = RequestLoop(pool, config, told)
        self._client = client
        self._scorer = scorer
        self._config = config
        self._decode = decode
        self._episodes = episodes
        self._scored_by = "rollout.episode and its log, trainer.log" if episodes else "reward.fn and reward.timeout"

    async def collect_batch(
        self,
        queue: PromptQueue,
        prompts: Mapping[str, Prompt],
        *,
        want: int,
        n_samples: int,
        sampling: Sampling,
        weight_version: int,
        concurrent_prompts: int,
        may_leave_out: bool = False,
    ) -> RolloutBatch:
        """The next `want` prompts of the queue (fewer at the end of an epoch), each with all its samples scored,
        at most `concurrent_prompts` of them in flight.

        As `RolloutStream.next_batch`.
        """
        stream = self.stream(
            queue,
            prompts,
            n_samples=n_samples,
            sampling=sampling,
            concurrent_prompts=concurrent_prompts,
            may_leave_out=may_leave_out,
        )
        try:
            return await stream.next_batch(want, version=weight_version)
        finally:
            await stream.close()

    def stream(
        self,
        queue: PromptQueue,
        prompts: Mapping[str, Prompt],
        *,
        n_samples: int,
        sampling: Sampling,
        concurrent_prompts: int,
        ahead: int = 0,
        newest: Callable[[], int] | None = None,
        most_batches: int | None = None,
        may_leave_out: bool = False,
    ) -> RolloutStream:
        """Batches one after another; `ahead` and what follows it as a RolloutStream has them."""

        async def make(prompt: Prompt, weights: Weights, tally: Tally, kept: Sequence[Completion]) -> RolloutGroup:
            return await self._group(prompt, n_samples, sampling, weights, tally, kept)

        return RolloutStream(
            make,
            queue,
            prompts,
            n_samples=n_samples,
            concurrent_prompts=concurrent_prompts,
            attempts=self._config.prompt_attempts,
            scored_by=self._scored_by,
            ahead=ahead,
            newest=newest,
            most_batches=most_batches,
            may_leave_out=may_leave_out,
        )

    async def _group(
        self,
        prompt: Prompt,
        n_samples: int,
        sampling: Sampling,
        weights: Weights,
        tally: Tally,
        kept: Sequence[Completion],
    ) -> RolloutGroup:
        try:
            if self._episodes is not None:
                return await self._played(self._episodes, prompt, sampling.for_samples(n_samples), weights, tally)
            completions = list(kept) or await self._completions(prompt, n_samples, sampling, weights, tally)
            return await self._scored(prompt, completions, sampling, weights, tally)
        except RequestFailed as failure:
            raise GroupFailed(str(failure)) from failure

    async def _played(
        self,
        episodes: EpisodeRunner,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        weights: Weights,
        tally: Tally,
    ) -> RolloutGroup:
        async def complete(token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
            turn = replace(prompt, token_ids=token_ids)  # its id is the prompt's: the server with the prefix has it
            (completion,) = await self._completions(turn, 1, sampling, weights, tally)
            return completion

        try:
            return RolloutGroup(prompt=prompt, rollouts=tuple(await episodes.rollouts(prompt, samplings, complete)))
        except EpisodeFailed as failure:
            raise GroupFailed(str(failure), scoring=True) from failure

    async def _scored(
        self, prompt: Prompt, completions: list[Completion], sampling: Sampling, weights: Weights, tally: Tally
    ) -> RolloutGroup:
        """The group with its rewards. A completion for which the reward function has no answer is generated anew, as
        often as a prompt is tried. Raises GroupFailed and RequestFailed."""
        texts = self._decode([completion.token_ids for completion in completions])
        scores = await self._scorer.score(texts, prompt, whole_or_none=True, made=completions)
        for attempt in range(self._config.prompt_attempts):
            failed = [place for place, score in enumerate(scores) if score.value is None]
            if not failed:
                break
            unanswered = [place for place in failed if scores[place].is_unanswered]
            tally.unanswered += len(unanswered)
            tally.late += sum(scores[place].is_late for place in failed)
            log.warning(
                "reward.no_score prompt=%s completions=%d reason=%r", prompt.id, len(failed), scores[failed[0]].error
            )
            if len(unanswered) < len(failed) or attempt == self._config.prompt_attempts - 1:
                raise GroupFailed(next(one.error for one in scores if one.error), scoring=True)
            anew = await self._completions(prompt, len(unanswered), sampling, weights, tally)
            written = self._decode([completion.token_ids for completion in anew])
            for place, completion, text in zip(unanswered, anew, written, strict=True):
                completions[place], texts[place] = completion, text
            scored = await self._scorer.score(written, prompt, whole_or_none=True, made=anew, group=texts)
            for place, score in zip(unanswered, scored, strict=True):
                scores[place] = score
        rollouts = [
            Rollout(completion=completion, text=text, reward=score.value, parts=score.parts)
            for completion, text, score in zip(completions, texts, scores, strict=True)
        ]
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

    async def _completions(
        self, prompt: Prompt, n_samples: int, sampling: Sampling, weights: Weights, tally: Tally
    ) -> list[Completion]:
        """All samples of one prompt; each further request asks for what the ones before did not bring, to the token."""
        version = weights.oldest if weights.newest is None else weights.newest
        samplings = sampling.for_samples(n_samples)
        progress = GroupProgress(prompt.token_ids, samplings, weights.oldest, or_newer=weights.newest is not None)
        request = GroupRequest(prompt.id, progress, self._client, self._config)
        try:
            async for attempt in request_attempts(self._config):
                with attempt:
                    tally.retried += attempt.num > 1
                    if not request.is_over():  # all may have come of newer weights than their server should have
                        await self._loop.ask(request, version)
        finally:
            tally.hedged += request.silences
        completions = progress.completions()
        tally.tokens += sum(len(completion.token_ids) for completion in completions)
        tally.kept += progress.kept_tokens
        return completions


class Stopped(Exception):
    """Raised by a source of rollouts when the run is to stop."""


class LiveRollouts:
    """Rollouts at the training temperature, and held-out accuracy, through a `RolloutEngine`."""

    def __init__(
        self,
        thread: LoopThread,
        engine: RolloutEngine,
        *,
        config: RunConfig,
        prompts: Mapping[str, Prompt],
        held_out: Mapping[str, Prompt],
        newest: Callable[[], int] | None = None,
    ) -> None:
        """`newest`: the version that is served now, for what is made ahead of the trainer."""
        self._thread = thread
        self._engine = engine
        self._config = config
        self._prompts = prompts
        self._held_out = held_out
        self._newest = newest
        self._stream: RolloutStream | None = None
        self._sampling = Sampling.from_config(config.gconfig)
        self._stopping = threading.Event()
        self._waiting: Future[Any] | None = None
        self._turn = threading.RLock()

    def collect(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch:
        """The next batch; with rollout.max_head_offpolicyness those after it are begun, and made meanwhile."""
        return self._wait(self._next_batch(queue, want, weight_version))

    async def _next_batch(self, queue: PromptQueue, want: int, weight_version: int) -> RolloutBatch:
        if self._stream is None or self._stream.queue is not queue:
            self._stream = self._stream_of(
                queue,
                ahead=self._config.rollout.max_head_offpolicyness,
                most_batches=self._config.actor.dynamic_sampling,
            )
        return await self._stream.next_batch(want, version=weight_version)

    def collect_apart(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch:
        """Prompts of another queue than the run's, at these weights only; what is made ahead is left alone."""
        return self._wait(self._stream_of(queue).next_batch(want, version=weight_version))

    def _stream_of(self, queue: PromptQueue, *, ahead: int = 0, most_batches: int | None = None) -> RolloutStream:
        return self._engine.stream(
            queue,
            self._prompts,
            n_samples=self._config.gconfig.n_samples,
            sampling=self._sampling,
            concurrent_prompts=self._config.rollout.max_concurrent_rollouts,
            ahead=ahead,
            newest=self._newest,
            most_batches=most_batches,
        )

    def abandon(self) -> None:
        """Drop what is being made ahead, as it is of weights that the trainer leaves."""
        if self._stream is not None:
            self._thread.call(self._stream.close())

    def evaluate(self, weight_version: int) -> EvalReport | None:
        """Mean reward on the held-out prompts, sampled as in training and greedy; None where there are none.

        A prompt that can't be scored is left out and counted: its greedy completion is the same at each try, so that
        the evaluation, and with it the run, would never end.
        """
        if not self._held_out:
            return None
        greedy = replace(self._sampling, temperature=0.0)
        sampled_n = self._config.evaluator.n_samples
        sampled = self._wait(self._evaluate(self._sampling, sampled_n, weight_version))
        best = self._wait(self._evaluate(greedy, 1, weight_version))
        return EvalReport(
            policy_version=weight_version,
            prompts=len(self._held_out),
            unscored=len(self._held_out.keys() - ({*sampled.used_ids} & {*best.used_ids})),
            sampled=mean_reward(sampled),
            greedy=mean_reward(best),
            by_dataset={
                name: [mean, best.rewards_by_dataset[name]]
                for name, mean in sampled.rewards_by_dataset.items()
                if name in best.rewards_by_dataset
            },
        )

    def stop(self) -> None:
        """The current wait raises Stopped, and so does every later one until `allow`. What is being made is dropped;
        what is made stays in the queue."""
        with self._turn:
            self._stopping.set()
            waiting = self._waiting
        if waiting is not None:
            waiting.cancel()
        if self._stream is not None:  # after that: a wait must not see its work cancelled before itself
            self._thread.submit(self._stream.close())

    def allow(self) -> None:
        """Undo a stop."""
        self._stopping.clear()

    def _evaluate(self, sampling: Sampling, n_samples: int, weight_version: int) -> Coroutine[Any, Any, RolloutBatch]:
        in_flight = self._config.rollout.max_concurrent_rollouts * self._config.gconfig.n_samples
        return self._engine.collect_batch(
            PromptQueue(list(self._held_out), seed=0, shuffle=False),
            self._held_out,
            want=len(self._held_out),
            n_samples=n_samples,
            sampling=sampling,
            weight_version=weight_version,
            concurrent_prompts=max(1, in_flight // n_samples),
            may_leave_out=True,
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._turn:  # a stop must find the wait that it stops
            if self._stopping.is_set():
                work.close()
                raise Stopped
            self._waiting = waiting = self._thread.submit(work)
        try:
            return waiting.result()
        except CancelledError as cancelled:
            raise Stopped from cancelled
        finally:
            self._waiting = None


def mean_reward(batch: RolloutBatch) -> float:
    return mean_of([rollout.reward for rollout in batch.rollouts if rollout.reward is not None])
