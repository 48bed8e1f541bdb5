"""The steps in the order of the log as the run's passes: after a recovery the numbers go back, and steps repeat.

A pass is what was written without going back. What the run is made of at the end are the last results of each step;
a fall may stand there, or in a pass that a recovery took back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.diagnosis.judging.onset import Fall, find_falls
from launcher.diagnosis.reading.log_records import REWARD, Floats, Steps

MOST_PASSES = 60
"""Passes that are looked at each for itself, the longest; a run that crashes for ever has thousands of two steps."""

Ints = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows [begin, end) of Steps, and before them the rows of earlier passes that it went on from: `rows` in all."""

    begin: int
    end: int
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFall:
    """A fall, in the rows of Steps. `stands`: it is part of what the run is now, no recovery took it back."""

    fall: Fall
    rows: Ints
    stands: bool

    @property
    def onset_row(self) -> int:
        return int(self.rows[self.fall.onset])

    @property
    def last_row(self) -> int:
        """Of the last bad step."""
        end = self.fall.end
        return int(self.rows[-1] if end is None else self.rows[end - 1])


def passes_of(steps: Steps) -> list[Pass]:
    numbers = steps.steps
    if not len(numbers):
        return []
    starts = [0, *(np.flatnonzero(np.diff(numbers) <= 0) + 1).tolist()]
    ends = [*starts[1:], len(numbers)]
    passes: list[Pass] = []
    standing = np.array([], dtype=np.int64)
    for begin, end in zip(starts, ends, strict=True):
        kept = standing[numbers[standing] < numbers[begin]]
        standing = np.concatenate((kept, np.arange(begin, end, dtype=np.int64)))
        passes.append(Pass(begin=begin, end=end, rows=standing))
    return passes


def falls_of(steps: Steps, passes: list[Pass]) -> list[FoundFall]:
    """Every fall of the run, oldest first; those that stand, and those that a recovery took back."""
    rewards: Floats = steps.column(REWARD)
    if not passes:
        return []
    last = passes[-1]
    found = {int(last.rows[fall.onset]): FoundFall(fall=fall, rows=last.rows, stands=True)
             for fall in find_falls(rewards[last.rows])}  # fmt: skip
    standing = set(last.rows.tolist())
    for one in sorted(passes[:-1], key=lambda one: one.begin - one.end)[:MOST_PASSES]:
        for fall in find_falls(rewards[one.rows]):
            row = int(one.rows[fall.onset])
            if one.begin <= row and not any(abs(row - other) <= 3 for other in found):
                found[row] = FoundFall(fall=fall, rows=one.rows, stands=row in standing)
    return [found[row] for row in sorted(found)]
