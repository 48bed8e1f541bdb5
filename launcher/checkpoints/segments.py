"""Splits a series into stretches of constant level: optimal partitioning, exact, by dynamic programming with pruning.

PELT (Killick, Fearnhead and Eckley 2012, "Optimal detection of changepoints with a linear computational cost"): the
cost of a stretch is its sum of squares about its mean, in variances of the noise, and each change costs a penalty.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


PENALTY = 4.0
"""Of a change, times log n: in standard errors a single step must stand out by √(8 log n), 7 at 500 steps."""
LONGEST = 8000
"""Points that are partitioned exactly; of a longer series means of neighbours are."""


def partition(series: Floats, noise: float) -> list[tuple[int, int]]:
    """The stretches (begin, end) of `series` in order. `noise`: standard deviation of one point."""
    n = len(series)
    if n == 0:
        return []
    width = -(-n // LONGEST)
    if width > 1:
        edges = np.arange(0, n, width)
        means = np.add.reduceat(series, edges) / np.diff(np.append(edges, n))
        return [(a * width, min(b * width, n)) for a, b in partition(means, noise / math.sqrt(width))]
    return _exact(series / noise, PENALTY * math.log(max(n, 3)))


def _exact(scaled: Floats, penalty: float) -> list[tuple[int, int]]:
    n = len(scaled)
    sums, squares = (np.concatenate(([0.0], np.cumsum(values))) for values in (scaled, scaled**2))
    best, last = np.empty(n + 1), np.zeros(n + 1, dtype=np.int64)
    best[0] = -penalty
    candidates = np.array([0], dtype=np.int64)
    for end in range(1, n + 1):
        total = sums[end] - sums[candidates]
        costs = best[candidates] + squares[end] - squares[candidates] - total * total / (end - candidates)
        at = int(np.argmin(costs))
        best[end], last[end] = costs[at] + penalty, candidates[at]
        candidates = np.append(candidates[costs <= best[end]], end)
    stretches, end = [], n
    while end > 0:
        stretches.append((int(last[end]), end))
        end = int(last[end])
    return stretches[::-1]
