"""Medians and ratios with their uncertainty. Pure.

Two things measured in the same round share what else the machine did then, so their ratio is taken round by round
and the interval comes from drawing rounds again (percentile bootstrap: Efron and Tibshirani, 1993, chapter 13).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

DRAWS = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the rounds' ratios, and the interval that holds it with CONFIDENCE."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One contestant's part of one round."""

    round: int
    contestant: str
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """`ours[i] / theirs[i]`, the two of one round. Raises ValueError where they don't pair, or one isn't positive."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} figures don't make pairs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a ratio needs positive figures")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    tail = (1 - CONFIDENCE) / 2
    return Ratio(value=median(ratios), low=quantile(medians, tail), high=quantile(medians, 1 - tail))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of figures in rising order, linear between neighbours: 0 is the first, 1 the last."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(figures: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """`median (least to most, n)` for people."""
    return (
        f"{median(figures):,.{digits}f}{unit} ({min(figures):,.{digits}f} to {max(figures):,.{digits}f}, "
        f"{len(figures)} times)"
    )
