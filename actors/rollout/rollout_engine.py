"""Prompts in, scored groups of completions out, through whichever servers are READY.

The samples of a prompt are one request, and each arrives as it is made. A failed request is retried with exponential
backoff and jitter for what is missing, from the last token that arrived, at another server where the first completed
nothing, and waits while there is none. What fails in the end has no reward: its prompt returns to the queue and is
generated again. A reward of 0 is only ever the reward function's own answer (P1).

Completions are scored as their group finishes, while the others are still being generated.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.data.prompt_queue import PromptQueue
from actors.episodes.episode import EpisodeFailed
from actors.episodes.episode_runner import EpisodeRunner
from actors.reward.reward_pool import Score
from actors.rollout.group_progress import GroupProgress
from actors.rollout.hedged_requests import MIGRATED, HedgedRequests, Told
from actors.rollout.request_retry import request_attempts
from actors.rollout.server_pool import ServerPool
from actors.serving.completions import Samples
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from launcher.base.errors import RewardError, RolloutError
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup
from launcher.config.schema import RolloutConfig

NOBODY_THERE = frozenset({"refused", "reset", "truncated"})
"""Failures of the server, not of the request."""


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


class GroupFailed(Exception):
    """One prompt's group could not be finished; `cause` is the last reason."""

    def __init__(self, cause: str, *, scoring: bool = False) -> None:
        super().__init__(cause)
        self.scoring = scoring


@dataclass
class Tally:
    """What one collection cost. `unscored_in_a_row`: groups since the last that was scored."""

    failed: int = 0
    retried: int = 0
    tokens: int = 0
    kept: int = 0
    unanswered: int = 0
    hedged: int = 0
    hedges_lost: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    unscored_in_a_row: int = 0


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
        """`told`: of requests that were sent to a second server."""
        self._requests = HedgedRequests(client, pool, config, told)
        self._pool = pool
        self._scorer = scorer
        self._config = config
        self._decode = decode
        self._episodes = episodes
        self._scored_by = "rollout.episode and its log, trainer.log" if episodes else "reward.fn and reward.timeout"

    async def collect(
        self,
        queue: PromptQueue,
        prompts: Mapping[str, Prompt],
        *,
        want: int,
        n_samples: int,
        sampling: Sampling,
        weight_version: int,
        concurrent_prompts: int,
    ) -> RolloutBatch:
        """The next `want` prompts of the queue (fewer at the end of an epoch), each with all its samples scored,
        at most `concurrent_prompts` of them in flight.

        Groups are in the order in which their prompts were taken, whichever finished first. On cancellation the
        prompts stay taken, neither committed nor requeued: a queue saved then counts them as never taken.
        Raises RolloutError (no server, or one prompt failing again and again) and RewardError.
        """
        started = time.monotonic()
        tally = Tally()
        taken: list[str] = []
        groups: dict[str, RolloutGroup] = {}
        running: dict[asyncio.Task[RolloutGroup], str] = {}
        try:
            while True:
                while len(running) < concurrent_prompts and len(groups) + len(running) < want:
                    ids = queue.take(1)
                    if not ids:
                        break
                    taken += ids
                    group = self._group(prompts[ids[0]], n_samples, sampling, weight_version, tally)
                    running[asyncio.create_task(group)] = ids[0]
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    prompt_id = running.pop(task)
                    try:
                        groups[prompt_id] = task.result()
                        tally.unscored_in_a_row = 0
                    except GroupFailed as failure:
                        self._give_back(prompt_id, failure, queue, tally)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        order = dict.fromkeys(taken)
        return RolloutBatch(
            groups=tuple(groups[prompt_id] for prompt_id in order if prompt_id in groups),
            failed=tally.failed,
            retried=tally.retried,
            generated_tokens=tally.tokens,
            kept_tokens=tally.kept,
            unanswered=tally.unanswered,
            hedged=tally.hedged,
            hedges_lost=tally.hedges_lost,
            seconds=time.monotonic() - started,
        )

    def _give_back(self, prompt_id: str, failure: GroupFailed, queue: PromptQueue, tally: Tally) -> None:
        queue.requeue([prompt_id])
        tally.failed += 1
        tally.attempts[prompt_id] += 1
        tally.unscored_in_a_row += failure.scoring
        if tally.unscored_in_a_row >= self._config.prompt_attempts:  # else each prompt of the epoch would be tried
            raise RewardError(
                f"{tally.unscored_in_a_row} prompts in a row could not be scored, last {prompt_id}: {failure}",
                self._scored_by,
            )
        if tally.attempts[prompt_id] < self._config.prompt_attempts:
            return
        kind = RewardError if failure.scoring else RolloutError
        raise kind(
            f"prompt {prompt_id} failed {self._config.prompt_attempts} times in one step, last: {failure}",
            self._scored_by if failure.scoring else "see llm_server-<i>.log; rollout.prompt_attempts",
        )

    async def _group(
        self, prompt: Prompt, n_samples: int, sampling: Sampling, weight_version: int, tally: Tally
    ) -> RolloutGroup:
        try:
            if self._episodes is not None:
                return await self._played(
                    self._episodes, prompt, sampling.for_samples(n_samples), weight_version, tally
                )
            completions = await self._completions(prompt, n_samples, sampling, weight_version, tally)
            return await self._scored(prompt, completions, sampling, weight_version, tally)
        except RequestFailed as failure:
            raise GroupFailed(str(failure)) from failure

    async def _played(
        self,
        episodes: EpisodeRunner,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        weight_version: int,
        tally: Tally,
    ) -> RolloutGroup:
        async def complete(token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
            turn = replace(prompt, token_ids=token_ids)  # its id is the prompt's: the server with the prefix has it
            (completion,) = await self._completions(turn, 1, sampling, weight_version, tally)
            return completion

        try:
            return RolloutGroup(prompt=prompt, rollouts=tuple(await episodes.rollouts(prompt, samplings, complete)))
        except EpisodeFailed as failure:
            raise GroupFailed(str(failure), scoring=True) from failure

    async def _scored(
        self, prompt: Prompt, completions: list[Completion], sampling: Sampling, weight_version: int, tally: Tally
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
            if len(unanswered) < len(failed) or attempt == self._config.prompt_attempts - 1:
                raise GroupFailed(next(one.error for one in scores if one.error), scoring=True)
            tally.unanswered += len(unanswered)
            anew = await self._completions(prompt, len(unanswered), sampling, weight_version, tally)
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
        self, prompt: Prompt, n_samples: int, sampling: Sampling, weight_version: int, tally: Tally
    ) -> list[Completion]:
        """All samples of one prompt; each further request asks for what the ones before did not bring, to the token.

        It goes to the same server if that brought some of them, as its cache holds the prefix; else to another.
        """
        progress = GroupProgress(prompt.token_ids, sampling.for_samples(n_samples), weight_version)
        avoid = ""
        async for attempt in request_attempts(self._config):
            with attempt:
                tally.retried += attempt.num > 1
                while True:
                    answer = await self._requests.ask(
                        progress, prompt=prompt.id, weight_version=weight_version, avoid=avoid
                    )
                    server, samples, progress = answer.server.name, answer.samples, answer.progress
                    self._pool.throughput.made(server, progress.take(samples))
                    tally.hedged += answer.hedged
                    tally.hedges_lost += answer.lost
                    if samples.failure is None or samples.failure.kind != MIGRATED:  # which is no attempt
                        break
                avoid = "" if samples.completions else server
                await self._judge(server, samples, weight_version)
        completions = progress.completions()
        tally.tokens += sum(len(completion.token_ids) for completion in completions)
        tally.kept += progress.kept_tokens
        return completions

    async def _judge(self, name: str, samples: Samples, weight_version: int) -> None:
        """Report to the pool what an answer shows of its server. Raises RequestFailed where a sample is missing."""
        made = (*samples.completions.values(), *samples.begun.values())
        others = {one.weight_version for one in made} - {weight_version}
        if others:
            reason = f"{name} answered with weight version {min(others)}, not {weight_version}"
            await self._pool.mark_stale(name, reason)
            raise RequestFailed(reason, kind="stale", retryable=True)
        if samples.failure is not None:
            if samples.failure.kind == "nonfinite":  # asked again, damaged weights would give the same
                await self._pool.mark_stale(name, str(samples.failure))
            if samples.failure.kind in NOBODY_THERE:
                await self._pool.suspect(name, samples.failure.kind)
            raise samples.failure
