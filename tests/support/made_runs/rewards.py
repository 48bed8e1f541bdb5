"""Made series of mean rewards, falling and healthy ones of many kinds, with their true onsets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Level = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """`rollouts` of a step, how much batches differ in difficulty, how far the level wanders, hard batches."""

    rollouts: int = 128
    prompts: float = 0.04
    drift: float = 0.0
    hard: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A series and its true onset, None where it is healthy."""

    rewards: tuple[float, ...]
    onset: int | None


def noisy(level: Level, steps: int, rng: random.Random, noise: Noise) -> list[float]:
    """Mean rewards of rollouts that pass with probability `level`, near enough to binomial."""
    drift, rewards = 0.0, []
    for step in range(steps):
        drift = 0.95 * drift + rng.gauss(0, noise.drift * math.sqrt(1 - 0.95**2))
        wanted = level(step)
        rate = wanted + drift + rng.gauss(0, noise.prompts) - 0.1 * (rng.random() < noise.hard) if wanted > 0 else 0.0
        rate = min(max(rate, 0.0), 1.0)
        passed = round(rng.gauss(rate * noise.rollouts, math.sqrt(rate * (1 - rate) * noise.rollouts)))
        rewards.append(min(max(passed, 0), noise.rollouts) / noise.rollouts)
    return rewards


def learning(rng: random.Random) -> Level:
    begin, end, pace = rng.uniform(0.15, 0.5), rng.uniform(0.6, 0.95), rng.uniform(25, 120)
    return lambda step: begin + (end - begin) * (1 - math.exp(-step / pace))


def some_noise(rng: random.Random) -> Noise:
    return Noise(
        rollouts=rng.choice([32, 64, 128, 256]), prompts=rng.uniform(0.02, 0.06), drift=rng.choice([0, 0, 0.015])
    )


def falls(make: Callable[[Level, int, random.Random], Level]) -> Callable[[random.Random], Drawn]:
    """Series that learn until an onset drawn from 40 to 400, then do what `make` says for 40 to 500 steps."""

    def drawn(rng: random.Random) -> Drawn:
        onset, after = rng.randint(40, 400), rng.randint(40, 500)
        level = make(learning(rng), onset, rng)
        return Drawn(rewards=tuple(noisy(level, onset + after, rng, some_noise(rng))), onset=onset)

    return drawn


def _zero(level: Level, onset: int, rng: random.Random) -> Level:
    return lambda step: level(step) if step < onset else 0.0


def _partly(level: Level, onset: int, rng: random.Random) -> Level:
    share = rng.uniform(0.3, 0.7)
    return lambda step: level(step) if step < onset else share * level(step) if step == onset else 0.0


def _plateau(level: Level, onset: int, rng: random.Random) -> Level:
    share = rng.uniform(0.2, 0.7)
    return lambda step: level(step) if step < onset else share * level(onset)


def _decay(shortest: int, longest: int) -> Callable[[Level, int, random.Random], Level]:
    def made(level: Level, onset: int, rng: random.Random) -> Level:
        over, foot = min(rng.randint(shortest, longest), 400), rng.uniform(0.0, 0.3)
        top = level(onset)
        return lambda step: (
            level(step) if step < onset else top - (top - foot * top) * min(1.0, (step - onset + 1) / over)
        )

    return made


def _spikes(level: Level, onset: int, rng: random.Random) -> Level:
    share, seed = rng.uniform(0.03, 0.15), rng.random()
    up = {step for step in range(onset + 1, onset + 600) if random.Random(f"{seed} {step}").random() < share}
    return lambda step: level(step) if step < onset or step in up else 0.0


FALLS: Mapping[str, Callable[[random.Random], Drawn]] = {
    "to exactly 0": falls(_zero),
    "to 0 after a half step": falls(_partly),
    "to a plateau": falls(_plateau),
    "decay over 8 to 40": falls(_decay(8, 40)),
    "decay over 40 to 200": falls(_decay(40, 200)),
    "zeros with spikes": falls(_spikes),
}


def healthy(
    make: Callable[[random.Random], Level], noise: Noise | None = None, more: int = 0
) -> Callable[[random.Random], Drawn]:
    def drawn(rng: random.Random) -> Drawn:
        level, steps = make(rng), rng.choice([60, 150, 400, 900]) + more
        return Drawn(rewards=tuple(noisy(level, steps, rng, noise or some_noise(rng))), onset=None)

    return drawn


def _flat(low: float, high: float) -> Callable[[random.Random], Level]:
    def made(rng: random.Random) -> Level:
        rate = rng.uniform(low, high)
        return lambda step: rate

    return made


def _warm_up(rng: random.Random) -> Level:
    level, steps = learning(rng), rng.randint(20, 80)
    return lambda step: level(max(0, step - steps))


def _dip(rng: random.Random) -> Level:
    level, depth, steps = learning(rng), rng.uniform(0.3, 0.6), rng.randint(5, 18)
    return lambda step: level(step) * (1 - depth * max(0.0, 1 - abs(step - steps) / steps))


def _stairs(rng: random.Random) -> Level:
    width, begin = rng.randint(40, 120), rng.uniform(0.1, 0.4)
    return lambda step: min(0.95, begin + 0.12 * (step // width))


def _harder_epoch(rng: random.Random) -> Level:
    level, at, by = learning(rng), rng.randint(60, 200), rng.uniform(0.02, 0.06)
    return lambda step: level(step) - (by if step >= at else 0.0)


def _late(rng: random.Random) -> Level:
    level, steps = learning(rng), rng.randint(30, 100)
    return lambda step: 0.0 if step < steps else level(step - steps) * min(1.0, (step - steps + 1) / 20)


def _lost_step(rng: random.Random) -> Level:
    level, lost = learning(rng), {rng.randint(30, 300) for _ in range(3)}
    return lambda step: 0.0 if step in lost else level(step)


HEALTHY: Mapping[str, Callable[[random.Random], Drawn]] = {
    "learning": healthy(learning),
    "plateau": healthy(_flat(0.3, 0.97)),
    "plateau of 8 rollouts": healthy(_flat(0.3, 0.8), Noise(rollouts=8)),
    "rare rewards": healthy(_flat(0.01, 0.04), Noise(rollouts=64, prompts=0.0, hard=0.0)),
    "wandering": healthy(_flat(0.4, 0.8), Noise(drift=0.04)),
    "learning and wandering": healthy(learning, Noise(drift=0.03)),
    "a fifth of batches hard": healthy(learning, Noise(hard=0.2)),
    "warm-up": healthy(_warm_up),
    "a dip at the beginning": healthy(_dip),
    "stairs": healthy(_stairs),
    "a harder epoch": healthy(_harder_epoch),
    "zeros, then learning": healthy(_late, more=60),
    "single lost steps": healthy(_lost_step),
}
