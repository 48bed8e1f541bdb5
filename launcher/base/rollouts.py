"""What a step trains on: prompts, their completions with log-probs and rewards, and the batch of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One training item.

    `id` is stable across runs and attempts. `token_ids` is the chat template applied to the question.
    `record` is the data set's own record, as the reward function gets it; `answer_key` its column of answers.
    `dataset`: the name of a further data set, "" of the first one.
    """

    id: str
    token_ids: tuple[int, ...]
    record: Mapping[str, object]
    answer_key: str | None = "answer"
    dataset: str = ""

    @property
    def answer(self) -> object:
        """None where the data set has no answers."""
        return None if self.answer_key is None else self.record[self.answer_key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion. `logprobs[t]` belongs to `token_ids[t]`, at the sampling temperature.

    `versions`: where the weights changed on the way, each version and how many tokens it made, in order; then
    `weight_version` is the oldest.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    finish_reason: str  # "stop" | "length"
    server: str = ""
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        return self.versions or ((self.weight_version, len(self.token_ids)),)

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Completion:
        """Raises KeyError and TypeError for what is none, ValueError for one that can't be trained on."""
        lists = {name: tuple(data[name]) for name in ("token_ids", "logprobs")}
        made = cls(**{**data, **lists, "versions": tuple((version, tokens) for version, tokens in data["versions"])})
        tokens = len(made.token_ids)
        if not tokens or tokens != len(made.logprobs) or tokens != sum(count for _, count in made.runs):
            raise ValueError(f"{tokens} tokens, {len(made.logprobs)} log-probs, versions {made.runs}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence of an episode: `completion` follows `prompt`, and the model is trained on its tokens that are `own`.

    The others are a template's, a tool's, or of a shared beginning that another segment trains on; their log-probs
    are 0 and mean nothing.
    """

    prompt: tuple[int, ...]
    completion: Completion
    own: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A completion with its text and reward; `reward` is None only where scoring failed, never 0 for a failure.

    `parts` of the reward, where it has several. Of an episode `completion` has all tokens that the model made, in order
    and without those between them, `segments` the sequences that are trained on, and `turns` counts its answers.
    """

    completion: Completion
    text: str
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt, in sample order; complete or not at all."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def is_flat(self) -> bool:
        """All rewards are equal: against the mean of the group none has an advantage."""
        return len({rollout.reward for rollout in self.rollouts}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What one step trains on, and what it cost to get it.

    `filtered`: flat groups that others have replaced (actor.dynamic_sampling): their prompts are used up, and their
    rewards count in every figure and for every detector, but they are not trained on.
    `failed` counts tries of a prompt's whole group that came to nothing (the prompt went back to the queue), `unscored`
    those of them that had their completions, but not all rewards (`no_score`: why the last had not), and `made` the
    groups that were finished meanwhile, those of later batches among them (None: those of this one). `retried` counts
    attempts beyond each request's first.
    `kept_tokens` counts those that a server had made of a completion before it failed, and from which another request
    continued; `unanswered` completions that the reward function had no answer for, and `late` those that it took too
    long for; `hedged` counts moves of requests whose server was silent. `seconds` that the trainer waited for it;
    `generated_tokens` were made in `generating_s`, those of later batches among them.
    """

    groups: tuple[RolloutGroup, ...]
    failed: int
    retried: int
    generated_tokens: int
    seconds: float
    kept_tokens: int = 0
    unanswered: int = 0
    late: int = 0
    hedged: int = 0
    generating_s: float | None = None
    filtered: tuple[RolloutGroup, ...] = ()
    unscored: int = 0
    no_score: str = ""
    made: int | None = None

    @property
    def all_groups(self) -> tuple[RolloutGroup, ...]:
        return (*self.groups, *self.filtered)

    @property
    def unseen_groups(self) -> tuple[RolloutGroup, ...]:
        """Of those left out, one for each server that alone made no completion that is trained on."""
        seen = {rollout.completion.server for group in self.groups for rollout in group.rollouts}
        found = []
        for group in self.filtered:
            # of one server alone
            makers = {one.completion.server for one in group.rollouts if " " not in one.completion.server}
            if not makers <= seen:
                seen |= makers
                found.append(group)
        return tuple(found)

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(group.prompt.id for group in self.groups)

    @property
    def filtered_ids(self) -> tuple[str, ...]:
        return tuple(group.prompt.id for group in self.filtered)

    @property
    def used_ids(self) -> tuple[str, ...]:
        """Trained on or left out: none of them is taken again in its epoch."""
        return (*self.prompt_ids, *self.filtered_ids)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for group in self.all_groups for rollout in group.rollouts)

    @property
    def rewards_by_dataset(self) -> dict[str, float]:
        """The mean of each data set, the first being `main`; empty where there is no further one."""
        rewards: dict[str, list[float]] = {}
        for group in self.all_groups:
            scored = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            rewards.setdefault(group.prompt.dataset or "main", []).extend(scored)
        return {} if set(rewards) <= {"main"} else {name: mean_of(those) for name, those in rewards.items()}

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """That made what is trained on."""
        trained = (rollout.completion for group in self.groups for rollout in group.rollouts)
        return tuple(sorted({version for completion in trained for version, _ in completion.runs}))


def mean_of(rewards: Sequence[float]) -> float:
    """NaN where they can't be added, being too large or both infinities: a batch must not crash its reader."""
    try:
        return fmean(rewards)
    except (OverflowError, ValueError):
        return math.nan
