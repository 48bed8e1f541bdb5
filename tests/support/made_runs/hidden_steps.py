"""Advice where 10 to 90 % of a falling run's steps are in no file.

Steps are hidden at random, in one hole, in several, before a late beginning, behind an early end, or by sampling as a
chart of WandB's does. Counted is how often the newest checkpoint that counts as good lies at or after the true onset;
a checkpoint of each step is taken to be there, which is the hardest case.
"""

from __future__ import annotations

import random

import numpy as np

from launcher.checkpoints.health_evidence import Bools, HealthEvidence, SeenSteps, judge
from launcher.checkpoints.onset import find_falls, standing
from launcher.config.supervision import RestoreConfig
from tests.support.made_runs.rewards import FALLS, Drawn

LEAST_HIDDEN, MOST_HIDDEN = 0.1, 0.9
WAYS = ("at random", "sampled", "one hole", "several holes", "late beginning", "early end")


def visible(steps: int, share: float, way: str, rng: random.Random) -> Bools:
    """Which of so many steps are seen where about `share` of them is hidden."""
    numbers, hidden = np.arange(steps), int(share * steps)
    match way:
        case "at random":
            return np.array([rng.random() > share for _ in numbers])
        case "sampled":
            every = max(2, round(1 / (1 - share)))
            return np.isin(numbers % every, rng.randrange(every))
        case "one hole":
            begin = rng.randint(0, steps - hidden)
            return (numbers < begin) | (numbers >= begin + hidden)
        case "late beginning":
            return numbers >= hidden
        case "early end":
            return numbers < steps - hidden
    seen = np.ones(steps, dtype=np.bool_)
    while seen.mean() > 1 - share:
        begin = rng.randrange(steps)
        seen[begin : begin + rng.randint(1, 40)] = False
    return seen


def evidence_of(drawn: Drawn, seen: Bools) -> HealthEvidence:
    rewards = np.array(drawn.rewards)[seen]
    shown = SeenSteps(steps=np.flatnonzero(seen), rewards=rewards, total=len(drawn.rewards))
    return judge(shown, standing(find_falls(rewards)), RestoreConfig(), source="made")


def advised(number: int, seed: int) -> tuple[int | None, int]:
    """The last step that counts as good in a made run, None for none, and its true onset."""
    rng = random.Random(f"{seed} hidden {number}")
    kind, way = list(FALLS)[number % len(FALLS)], rng.choice(WAYS)
    drawn = FALLS[kind](rng)
    seen = visible(len(drawn.rewards), rng.uniform(LEAST_HIDDEN, MOST_HIDDEN), way, rng)
    assert drawn.onset is not None
    return evidence_of(drawn, seen).good_until, drawn.onset
