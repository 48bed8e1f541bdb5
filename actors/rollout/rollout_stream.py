"""The groups of the next batches, made while the trainer steps: `ahead` batches more than the one it waits for.

    take_prompts ─► in flight, at most (ahead + 1) batches ─► made side by side ─► those taken first are the next batch
         ▲             launcher/policy/routing.py                  │ failed
         └─────────────────────────────────────────────────────────┘

Prompts are taken and given back only within `next_batch`, while the trainer waits, so the queue has one user at a time,
and which prompts make a batch doesn't depend on how fast they are: not those that finished first, which are the short
ones. With `ahead` 0 nothing is left running when a batch is returned. What is finished is kept in the queue, and so in
the state that a step leaves: a restored prompt is only scored anew, by the reward function as it is then.

With `most_batches` flat groups are replaced (actor.dynamic_sampling): a step uses up the shortest beginning of the
order of taking that has a batch of other groups, but at most `most_batches` of prompts, and no more than the epoch has.
Where all are flat the first ones are trained on as they are, so that the step is taken and its rewards are judged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from actors.data.prompt_queue import PromptQueue
from launcher.base.errors import RewardError, RolloutError
from launcher.base.rollouts import Completion, Prompt, RolloutBatch, RolloutGroup
from launcher.policy.routing import may_take, trained_at


class GroupFailed(Exception):
    """One prompt's group could not be finished; `cause` is the last reason."""

    def __init__(self, cause: str, *, scoring: bool = False) -> None:
        super().__init__(cause)
        self.scoring = scoring


@dataclass
class Tally:
    """What it cost since the last batch. `made`, `failed` and `unscored` count prompts' groups, one for each try;
    `unscored_in_a_row`: the prompts since the last that was scored; `no_score`: why the last had no score."""

    made: int = 0
    failed: int = 0
    unscored: int = 0
    retried: int = 0
    tokens: int = 0
    kept: int = 0
    unanswered: int = 0
    late: int = 0
    hedged: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    unscored_in_a_row: set[str] = field(default_factory=set)
    no_score: str = ""

    def reset(self) -> None:
        """In place: what is being made counts for the next batch."""
        vars(self).update(vars(Tally()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Which weights may make a group: those of version `oldest`; with `newest`, the version that is served now, newer
    ones too."""

    oldest: int
    newest: Callable[[], int] | None = None


Make = Callable[[Prompt, Weights, Tally, Sequence[Completion]], Awaitable[RolloutGroup]]
"""Makes a prompt's group, or where its completions are given scores them. Raises GroupFailed."""


class RolloutStream:
    """Used on one asyncio loop; lives as long as its queue. `newest`: the version that is served now."""

    def __init__(
        self,
        make: Make,
        queue: PromptQueue,
        prompts: Mapping[str, Prompt],
        *,
        n_samples: int,
        concurrent_prompts: int,
        attempts: int,
        scored_by: str,
        ahead: int = 0,
        newest: Callable[[], int] | None = None,
        most_batches: int | None = None,
        may_leave_out: bool = False,
    ) -> None:
        """`attempts`: failed tries of one prompt, or prompts in a row that failed, after which it raises; `scored_by`:
        where to look then. `may_leave_out`: a prompt alone that can't be scored is not in its batch."""
        self.queue = queue
        self._make = make
        self._prompts = prompts
        self._n_samples = n_samples
        self._slots = asyncio.Semaphore(concurrent_prompts)
        self._attempts = attempts
        self._scored_by = scored_by
        self._ahead = ahead
        self._most_batches = most_batches
        self._may_leave_out = may_leave_out
        self._newest = newest if ahead else None
        self._tally = Tally()
        self._since: float | None = None
        self._taken: dict[str, None] = {}  # in the order in which they were taken, until their batch is returned
        self._groups: dict[str, RolloutGroup] = {}
        self._flat: set[str] = set()  # of those, where flat groups are replaced
        self._running: dict[asyncio.Task[RolloutGroup], str] = {}

    async def next_batch(self, want: int, *, version: int) -> RolloutBatch:
        """The groups of the `want` prompts that were taken first (fewer at the end of an epoch), and of those that flat
        ones among them were replaced by, for the step that begins with the weights of `version`.

        On cancellation prompts stay taken, neither committed nor requeued: a queue saved then counts them as never
        taken. Raises RolloutError (no server, or one prompt failing again and again) and RewardError.
        """
        started = time.monotonic()
        await self._drop_what_left_the_queue()
        try:
            self._take_prompts(want, version)
            while (made := self._next(want)) is None:
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._land(task)
                self._take_prompts(want, version)
        except BaseException:
            await self.close()
            raise
        batch = self._batch(made, want, started)
        self._tally.reset()
        return batch

    async def close(self) -> None:
        """Drop what is being made, and what is made and not in a batch."""
        running = list(self._running)
        self._running = {}
        self._taken = {}
        self._groups = {}
        self._flat.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _drop_what_left_the_queue(self) -> None:
        """A restore, a rejected batch or a pause has put prompts back: what was made of them counts no more."""
        in_flight = set(self.queue.in_flight)
        if not self._taken.keys() <= in_flight:
            await self.close()

    def _take_prompts(self, want: int, version: int) -> None:
        flat, most = len(self._flat), self._most_batches or 1
        room = may_take(len(self._taken), batch=want, ahead=self._ahead, flat=flat, most_batches=most)
        for prompt_id in self.queue.take_prompts(room) if room else ():
            step = trained_at(len(self._taken), version=version, batch=want)
            kept = self._usable(self.queue.kept(prompt_id), until=version, since=step - self._ahead)
            self._taken[prompt_id] = None
            weights = Weights(oldest=version, newest=self._newest)
            self._running[asyncio.create_task(self._group(prompt_id, weights, kept))] = prompt_id

    def _usable(self, kept: tuple[Completion, ...], *, until: int, since: int) -> tuple[Completion, ...]:
        """What a state kept, where all of it is of weights that its step may be trained on."""
        versions = [version for completion in kept for version, _ in completion.runs]
        is_right = len(kept) == self._n_samples and since <= min(versions) and max(versions) <= until
        return kept if is_right else ()

    async def _group(self, prompt_id: str, weights: Weights, kept: Sequence[Completion]) -> RolloutGroup:
        async with self._slots:
            group = await self._make(self._prompts[prompt_id], weights, self._tally, kept)
        if self._ahead and not any(rollout.segments for rollout in group.rollouts):  # an episode is played anew
            self.queue.keep(prompt_id, [rollout.completion for rollout in group.rollouts])
        return group

    def _next(self, want: int) -> list[str] | None:
        """The prompts that the next step uses up; None while one of them is being made."""
        made: list[str] = []
        missing = want
        for prompt_id in islice(self._taken, want * (self._most_batches or 1)):
            if prompt_id not in self._groups:
                return None
            made.append(prompt_id)
            missing -= prompt_id not in self._flat
            if not missing:
                break
        return made

    def _land(self, task: asyncio.Task[RolloutGroup]) -> None:
        prompt_id = self._running.pop(task)
        try:
            group = self._groups[prompt_id] = task.result()
            if self._most_batches is not None and group.is_flat:
                self._flat.add(prompt_id)
            self._tally.made += 1
            self._tally.unscored_in_a_row.clear()
        except GroupFailed as failure:
            del self._taken[prompt_id]
            self._give_back(prompt_id, failure)

    def _give_back(self, prompt_id: str, failure: GroupFailed) -> None:
        tally = self._tally
        tally.failed += 1
        tally.unscored += failure.scoring
        tally.attempts[prompt_id] += 1
        if failure.scoring:
            tally.unscored_in_a_row.add(prompt_id)
        tally.no_score = str(failure) if failure.scoring else tally.no_score
        is_spent = tally.attempts[prompt_id] >= self._attempts
        if is_spent and failure.scoring and self._may_leave_out and self._taken:
            self.queue.commit([prompt_id])
            return
        self.queue.requeue([prompt_id])
        if len(tally.unscored_in_a_row) >= self._attempts:  # else each prompt of the epoch would be tried
            raise RewardError(
                f"{len(tally.unscored_in_a_row)} prompts in a row could not be scored, last {prompt_id}: {failure}",
                self._scored_by,
            )
        if not is_spent:
            return
        kind = RewardError if failure.scoring else RolloutError
        raise kind(
            f"prompt {prompt_id} failed {self._attempts} times in one step, last: {failure}",
            self._scored_by if failure.scoring else "see llm_server-<i>.log; rollout.prompt_attempts",
        )

    def _batch(self, ids: Sequence[str], want: int, started: float) -> RolloutBatch:
        flat = [prompt_id for prompt_id in ids if prompt_id in self._flat]
        trained = [prompt_id for prompt_id in ids if prompt_id not in self._flat] or flat[:want]
        for prompt_id in ids:
            del self._taken[prompt_id]
        self._flat.difference_update(ids)
        groups = {prompt_id: self._groups.pop(prompt_id) for prompt_id in ids}
        now, tally = time.monotonic(), self._tally
        since = self._since if self._ahead and self._since else started
        self._since = now
        return RolloutBatch(
            groups=tuple(groups.pop(prompt_id) for prompt_id in trained),
            filtered=tuple(groups.values()),
            failed=tally.failed,
            unscored=tally.unscored,
            no_score=tally.no_score,
            # a batch whose groups were all made before has them still, or one failure would be all of its requests
            made=max(tally.made, len(ids)),
            retried=tally.retried,
            generated_tokens=tally.tokens,
            kept_tokens=tally.kept,
            unanswered=tally.unanswered,
            late=tally.late,
            hedged=tally.hedged,
            seconds=now - started,
            generating_s=now - since,
        )
