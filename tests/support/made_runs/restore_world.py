"""A made run: what its completions earn under each cause, and what it keeps.

Rewards are drawn; the HealthMonitor, the run's own record and the recovery plan are the real ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from actors.data.prompt_queue import PromptQueue
from actors.reward.reward_pool import Score
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup
from tests.support.made_runs.rewards import learning

PROMPTS, SAMPLES = 16, 8
HARD_SHARE, HARDER_BY, BATCHES_DIFFER = 0.03, 0.1, 0.03
FLIPS = 0.1
HONEST, STALE, DAMAGED = 1e-4, 0.05, 2.0
"""Distances of log-probs, in nats: rounding in bfloat16, some versions behind, another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a cause does from its step on. `weights(n)`: share of the true level that weights keep n steps after they
    were damaged. `new`, `old`: what the function makes of a reward, `age` steps after the onset; `prompts`: share of
    the level at a position of the data; `asked`: share that any new answer earns. `named`: what is to be found."""

    named: str
    weights: Callable[[int], float] | None = None
    new: Callable[[float, int, float], float] = lambda reward, age, draw: reward
    old: Callable[[float, int, float], float] = lambda reward, age, draw: reward
    prompts: Callable[[int], float] = lambda after: 1.0
    asked: float = 1.0
    distance: float = HONEST
    is_noisy: bool = False


def _zero(reward: float, age: int, draw: float) -> float:
    return 0.0


def _half(reward: float, age: int, draw: float) -> float:
    return 0.0 if draw < 0.5 else reward


def _drifts(reward: float, age: int, draw: float) -> float:
    return reward * max(0.0, 1 - 0.02 * age)


def _for_both(change: Callable[[float, int, float], float]) -> Mapping[str, Any]:
    return {"new": change, "old": change}


CAUSES: Mapping[str, Fault] = {
    "policy collapses at once": Fault(named="reward_collapse", weights=lambda n: 0.0),
    "policy collapses over 30 steps": Fault(named="reward_collapse", weights=lambda n: max(0.0, 1 - n / 30)),
    "policy loses half": Fault(named="reward_collapse", weights=lambda n: 0.5),
    "reward function: 0 for all": Fault(named="verifier_broken", **_for_both(_zero)),
    "reward function: 0 for half": Fault(named="verifier_broken", **_for_both(_half)),
    "reward function: 0 for new completions only": Fault(named="outside_weights", new=_zero),
    "judge drifts by 2 % a step": Fault(named="verifier_broken", **_for_both(_drifts)),
    "judge that errs in 10 %, then 0 for all": Fault(named="verifier_broken", is_noisy=True, **_for_both(_zero)),
    "data: prompts twice as hard": Fault(named="data", prompts=lambda after: 0.5 if after >= 0 else 1.0),
    "wrong chat template": Fault(named="outside_weights", asked=0.4),
    "server with old weights": Fault(named="server_stale", asked=0.9, distance=STALE),
    "server with damaged weights": Fault(named="server_corrupt", asked=0.1, distance=DAMAGED),
    "three hard batches": Fault(named="nothing", prompts=lambda after: 0.65 if 0 <= after < 3 else 1.0),
    "nothing": Fault(named="nothing"),
}


@dataclass(kw_only=True)
class MadeRun:
    """`step`: the next one. `damaged_since`: the step whose update damaged the weights that are loaded, if one did."""

    fault: Fault
    onset: int
    rng: random.Random
    step: int = 0
    has_begun: bool = False
    is_mended: bool = False
    damaged_since: int | None = None
    has_damaged: bool = False
    texts: dict[str, float] = field(default_factory=dict)

    @cached_property
    def level(self) -> Callable[[int], float]:
        return learning(random.Random(self.rng.random()))

    def take_step(self) -> None:
        """As of the step before the onset a collapse is in the weights; the step that is taken again has no such
        accident."""
        if self.fault.weights is not None and self.step == self.onset - 1 and not self.has_damaged:
            self.damaged_since = self.step
            self.has_damaged = True
        self.step += 1

    def restore(self, step: int) -> None:
        self.step = step + 1
        if self.damaged_since is not None and step < self.damaged_since:
            self.damaged_since = None

    def quality(self) -> float:
        """What the weights are worth on prompts as they used to be."""
        kept = 1.0
        if self.fault.weights is not None and self.damaged_since is not None:
            kept = self.fault.weights(self.step - self.damaged_since)
        return self.level(self.step) * kept

    @property
    def _is_on(self) -> bool:
        return self.has_begun and not self.is_mended

    def batch_rewards(self) -> list[list[float]]:
        """Of the next batch, by prompt."""
        self.has_begun = self.has_begun or self.step >= self.onset
        hard = HARDER_BY * (self.rng.random() < HARD_SHARE)
        rate = self.quality() * self.fault.prompts(self.step - self.onset) - hard
        return self._answered(rate + self.rng.gauss(0, BATCHES_DIFFER), PROMPTS)

    def replayed_rewards(self, count: int) -> list[list[float]]:
        return self._answered(self.quality(), count)

    def _answered(self, rate: float, count: int) -> list[list[float]]:
        rate = min(max(rate * (self.fault.asked if self._is_on else 1.0), 0.0), 1.0)
        return [[self._scored(rate, self.fault.new) for _ in range(SAMPLES)] for _ in range(count)]

    def _scored(self, rate: float, change: Callable[[float, int, float], float]) -> float:
        return self.score(float(self.rng.random() < rate), self.rng.random(), change)

    def score(self, truth: float, draw: float, change: Callable[[float, int, float], float]) -> float:
        if self.fault.is_noisy and self.rng.random() < FLIPS:
            truth = 1 - truth
        return change(truth, self.step - self.onset, draw) if self._is_on else truth

    # ── what the run's own record asks ──

    def batch_of(self, rewards: Sequence[Sequence[float]], ids: Sequence[str]) -> RolloutBatch:
        groups = []
        for name, scores in zip(ids, rewards, strict=True):
            rollouts = []
            for number, reward in enumerate(scores):
                text = f"{name} {number} {len(self.texts)}"
                self.texts[text] = reward
                completion = Completion(token_ids=(1,), logprobs=(0.0,), weight_version=0, finish_reason="stop")
                rollouts.append(Rollout(completion=completion, text=text, reward=reward))
            prompt = Prompt(id=name, token_ids=(1,), record={})
            groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
        return RolloutBatch(groups=tuple(groups), failed=0, retried=0, generated_tokens=0, seconds=0.0)

    def replay(self, queue: PromptQueue, want: int, version: int) -> RolloutBatch:
        del version
        ids = [str(name) for name in queue.take_prompts(want)]
        return self.batch_of(self.replayed_rewards(len(ids)), ids)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The made run as an `AnswerScorer`."""

    run: MadeRun

    async def score(
        self, completions: Sequence[str], prompt: Any, *, whole_or_none: bool = False, made: Any = (), group: Any = ()
    ) -> list[Score]:
        del prompt, whole_or_none
        known, change = self.run.texts, self.run.fault.old
        return [Score(value=self.run.score(known[text], random.Random(text).random(), change)) for text in completions]


def at_once(work: Coroutine[Any, Any, list[list[Score]]]) -> Future[list[list[Score]]]:
    """Runs a coroutine that waits for nothing."""
    done: Future[list[list[Score]]] = Future()
    done.set_result(asyncio.run(work))
    return done
