"""The run's own known answers: completions of healthy steps, kept to tell reward function and weights apart.

    admitted batch ─► note: a few completions, scored some more times, which shows how noisy a score is
    rejected batch ─► distrust: what was noted last is not kept
    low batch      ─► check: the completions scored again ─► is it the reward function?
                             their prompts answered again ─► is it the new prompts, or weights and servers?

Unlike those of `canaries`, they need neither answers in the data set nor a function that gives the same score twice.
They are kept on disk, so that an attempt that begins with a broken function is not misled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.data.prompt_queue import PromptQueue
from actors.reward.known_answers import AnswerScorer
from actors.reward.reward_pool import Scorable, Score
from launcher.base.durable import replace_file
from launcher.base.errors import RewardError, RewardImportError
from launcher.base.rollouts import RolloutBatch, RolloutGroup
from launcher.policy.canary_policy import CanaryScore, compare_replayed, compare_rescored

TRIES = 3
"""How often a completion is scored when it is noted. The score that it was trained with is not one of them: the best
one of a group was chosen for it."""
NOTED_AT_ONCE = 4
NOTED_EVERY = 5
"""Steps between two notes, once there are as many as are kept."""
LEAST = 8
"""Fewer are not asked."""
REPLAYED = 32
"""Prompts that are answered again, the newest: older ones were answered by a policy that knew less."""

RESCORED_WITHIN_S = 30.0
"""What is not scored again by then says nothing. Neither a pause nor the repair of a server waits longer for it."""
NOT_IN_TIME = Score(value=None, error="not in time")
LATE = f"fewer than {LEAST} were scored within {RESCORED_WITHIN_S:g} s"

log = logging.getLogger("recorded")

Submit = Callable[[Coroutine[Any, Any, list[list[Score]]]], "Future[list[list[Score]]]"]
Replay = Callable[[PromptQueue, int, int], RolloutBatch]
"""Answers prompts: (queue, how many, weight version). Raises what `LiveRollouts.collect` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """`completion` of a step, its `scores`, and the rewards of all samples of its prompt then."""

    step: int
    prompt_id: str
    completion: str
    group: tuple[float, ...]
    scores: tuple[float, ...] = ()


class RecordedAnswers:
    """`note` and `check` belong to the training thread; `rescore` may be called from any other.

    `submit` runs a coroutine on the loop of the `scorer`.
    """

    def __init__(
        self,
        prompts: Mapping[str, Scorable],
        scorer: AnswerScorer,
        *,
        count: int,
        keep_in: Path,
        submit: Submit,
        replay: Replay,
    ) -> None:
        self._prompts = prompts
        self._scorer = scorer
        self._count = count
        self._path = keep_in
        self._submit = submit
        self._replay = replay
        self._known = [one for one in _read(keep_in) if one.prompt_id in prompts][:count]
        self._noted: tuple[list[RecordedAnswer], Future[list[list[Score]]]] | None = None
        self._before: int | None = None

    @property
    def is_enough(self) -> bool:
        return len(self._known) >= LEAST

    def note(self, batch: RolloutBatch, step: int) -> None:
        """Keep some of an admitted batch. Beyond the count, which one makes room is drawn: a few grow old, since a
        function that drifts is seen by those alone."""
        self._take_scored()
        self._known = [one for one in self._known if one.step < step]  # it is taken again: later ones were undone
        is_full = len(self._known) >= self._count
        if self._count == 0 or self._noted is not None or (is_full and step % NOTED_EVERY):
            return
        # Those with a signal alone would be no sample of what the prompts earn; but the gate has compared the log-probs
        # of no others, so one that was left out counts where its servers' weights are among the compared.
        compared = set().union(*map(_makers, batch.groups))
        made = [group for group in batch.all_groups if _makers(group) <= compared]
        chosen = random.Random(step).sample(made, min(NOTED_AT_ONCE, len(made)))
        answers = []
        for group in chosen:
            rewards = tuple(rollout.reward for rollout in group.rollouts if rollout.reward is not None)
            best = max(group.rollouts, key=lambda rollout: rollout.reward or 0.0)
            answer = RecordedAnswer(step=step, prompt_id=group.prompt.id, completion=best.text, group=rewards)
            answers.append(answer)
        self._noted = answers, self._submit(self._score(answers, TRIES))

    def distrust(self) -> None:
        """A batch was rejected: what spoilt it may have spoilt what was scored since the one before."""
        self._noted = None

    def check(self, before_step: int, weight_version: int) -> tuple[CanaryScore | None, CanaryScore | None]:
        """What the completions of before a step are scored now, and what their prompts earn now; None each where too
        few are known. Raises as `replay` does."""
        self._before = before_step
        asked = self._asked()
        if not asked:
            return None, None
        rescored = self.rescore()
        if rescored is not None and rescored.error == LATE:
            rescored = None  # a slow function is not a broken one
        if rescored is not None and (rescored.got is None or rescored.is_low):
            return rescored, None  # what new answers earn shows nothing now
        newest = sorted(asked, key=lambda one: one.step)[-REPLAYED:]
        by_prompt = {one.prompt_id: one for one in newest}
        queue = PromptQueue(list(by_prompt), seed=0, shuffle=False)
        batch = self._replay(queue, len(by_prompt), weight_version)
        now = {group.prompt.id: [r.reward for r in group.rollouts if r.reward is not None] for group in batch.groups}
        pairs = [(by_prompt[name], rewards) for name, rewards in now.items() if rewards]
        then, after = [known.group for known, _ in pairs], [rewards for _, rewards in pairs]
        return rescored, compare_replayed(then, after, [known.step for known, _ in pairs])

    def rescore(self) -> CanaryScore | None:
        """The same completions as at the last check, scored once more: as many of them as are in time."""
        asked = self._asked()
        if not asked:
            return None
        try:
            scores = self._submit(self._score_in_time(asked)).result()
        except (RewardError, RewardImportError) as error:
            return compare_rescored([one.scores for one in asked], [None] * len(asked), error.message)
        answered = [(one.scores, now) for one, (now,) in zip(asked, scores, strict=True) if now != NOT_IN_TIME]
        errors = [now.error for _, now in answered if now.error]
        if len(answered) < LEAST:
            return compare_rescored([one.scores for one in asked], [None] * len(asked), next(iter(errors), LATE))
        earlier = [scores for scores, _ in answered]
        return compare_rescored(earlier, [now.value for _, now in answered], next(iter(errors), ""))

    def _asked(self) -> list[RecordedAnswer]:
        known = [one for one in self._known if self._before is None or one.step < self._before]
        return known if len(known) >= LEAST else []

    async def _score(self, answers: Sequence[RecordedAnswer], times: int) -> list[list[Score]]:
        asked = [self._scorer.score([one.completion] * times, self._prompts[one.prompt_id]) for one in answers]
        return list(await asyncio.gather(*asked))

    async def _score_in_time(self, answers: Sequence[RecordedAnswer]) -> list[list[Score]]:
        """Each once. What is late is taken out of the scorer's queue."""
        asked = [asyncio.ensure_future(self._scorer.score([a.completion], self._prompts[a.prompt_id])) for a in answers]
        done, late = await asyncio.wait(asked, timeout=RESCORED_WITHIN_S)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [one.result() if one in done else [NOT_IN_TIME] for one in asked]

    def _take_scored(self) -> None:
        """What was noted, once it is scored. One that could not be is of no use."""
        if self._noted is None or not self._noted[1].done():
            return
        (answers, scoring) = self._noted
        self._noted = None
        if scoring.cancelled() or scoring.exception() is not None:
            log.warning("recorded.not_scored reason=%r", scoring.cancelled() or scoring.exception())
            return
        known = list(self._known)
        for answer, scores in zip(answers, scoring.result(), strict=True):
            values = tuple(score.value for score in scores if score.value is not None)
            if len(values) < TRIES or not answer.group:
                continue
            if len(known) >= self._count:
                known.pop(random.Random(f"{answer.step} {answer.prompt_id}").randrange(len(known)))
            known.append(replace(answer, scores=values))
        self._known = known
        try:
            replace_file(self._path, json.dumps([asdict(one) for one in known]).encode())
        except OSError as error:  # a full disk costs the memory of later attempts, not this one
            log.warning("recorded.not_kept path=%s reason=%r", self._path, error)


def _makers(group: RolloutGroup) -> set[tuple[str, int]]:
    """Each server with the weights that it had."""
    return {(one.completion.server, version) for one in group.rollouts for version, _ in one.completion.runs}


def _read(path: Path) -> list[RecordedAnswer]:
    try:
        kept = json.loads(path.read_text())
        return [RecordedAnswer(**one | {"group": tuple(one["group"]), "scores": tuple(one["scores"])}) for one in kept]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:  # damaged: note again, and log it
        log.warning("recorded.unreadable path=%s reason=%r", path, error)
        return []
