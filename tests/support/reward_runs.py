"""Made-up runs whose mean rewards behave as those of real ones (their noise, trend and plateaus), seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from launcher.policy.reward_health import RewardPoint

HARDER_BY = 0.1


@dataclass(frozen=True)
class Run:
    """`level(step)` is the pass rate. `prompts_sd`: how much batches differ in difficulty. `drift_sd`: how far the
    policy wanders to and fro over tens of steps. `hard_share` of the batches have a pass rate lower by 0.1."""

    level: Callable[[int], float]
    rollouts: int = 128
    prompts_sd: float = 0.05
    drift_sd: float = 0.0
    hard_share: float = 0.05
    scale: float = 1.0

    def points(self, steps: int, seed: object) -> list[RewardPoint]:
        rng, drift, made = random.Random(str(seed)), 0.0, []
        for step in range(steps):
            drift = 0.95 * drift + rng.gauss(0, self.drift_sd * math.sqrt(1 - 0.95**2))
            rate = self.level(step) + drift - HARDER_BY * (rng.random() < self.hard_share)
            if self.level(step) > 0:
                rate += rng.gauss(0, self.prompts_sd)
            rate = min(max(rate, 0.0), 1.0)
            passed = rng.gauss(rate, math.sqrt(rate * (1 - rate) / self.rollouts))  # near enough to binomial
            mean = min(max(round(passed * self.rollouts), 0), self.rollouts) / self.rollouts
            high = self.scale if mean > 0 else 0.0
            low = 0.0 if mean < 1 else self.scale
            made.append(RewardPoint(step=step, mean=mean * self.scale, low=low, high=high))
        return made


def learning(step: int) -> float:
    return 0.34 + 0.5 * (1 - math.exp(-step / 60))


def steady(rate: float) -> Callable[[int], float]:
    return lambda step: rate


def falling(before: float, to: float, at: int, over: int = 1) -> Callable[[int], float]:
    """From `at` on; in `over` steps."""
    return lambda step: before + (to - before) * min(max((step - at + 1) / over, 0.0), 1.0)


HEALTHY = {
    "plateau at 0.4": Run(steady(0.4)),
    "plateau at 0.8": Run(steady(0.8), prompts_sd=0.06),
    "plateau at 0.97": Run(steady(0.97), prompts_sd=0.03),
    "plateau at 0.4 with 32 rollouts": Run(steady(0.4), rollouts=32, prompts_sd=0.0),
    "plateau at 0.5 with 8 rollouts": Run(steady(0.5), rollouts=8),
    "learning, then a plateau": Run(learning),
    "learning with 32 rollouts": Run(learning, rollouts=32),
    "wandering": Run(steady(0.6), drift_sd=0.02),
    "rewards from 0 to 10": Run(learning, scale=10.0),
    "a fifth of the batches harder": Run(steady(0.6), hard_share=0.2),
}
