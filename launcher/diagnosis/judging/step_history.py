"""Splits a run's steps into passes, and finds the falls of each: after a recovery, step numbers start lower again.

A pass is what was written without going back. The run as it is now is made of the last results of each step; a fall may
be in these, or in a pass that a recovery undid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.checkpoints.health_evidence import HealthEvidence, SeenSteps, judge
from launcher.checkpoints.onset import ZERO_STREAK, Fall, find_falls, standing
from launcher.config.supervision import RestoreConfig
from launcher.diagnosis.reading.log_records import REWARD, Contents, Floats, Steps

MOST_PASSES = 60
"""The longest passes are judged each for itself; a run that crashes for ever has thousands of two steps."""

Ints = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows [begin, end) of Steps, and before them the rows of earlier passes that it continues: `rows` in all."""

    begin: int
    end: int
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFall:
    """A fall, in the rows of Steps. `is_current`: it is part of what the run is now, no recovery undid it."""

    fall: Fall
    rows: Ints
    is_current: bool


def passes_of(steps: Steps) -> list[Pass]:
    numbers = steps.steps
    if not len(numbers):
        return []
    backs = {one.after: one.step for one in steps.backs}  # the last of those after the same step holds
    starts = sorted({0, *(np.flatnonzero(np.diff(numbers) <= 0) + 1).tolist(), *backs})
    ends = [*starts[1:], len(numbers)]
    passes: list[Pass] = []
    current = np.array([], dtype=np.int64)
    for begin, end in zip(starts, ends, strict=True):
        kept = current[numbers[current] <= backs[begin]] if begin in backs else current
        kept = kept[numbers[kept] < numbers[begin]] if begin < end else kept
        current = np.concatenate((kept, np.arange(begin, end, dtype=np.int64)))
        passes.append(Pass(begin=begin, end=end, rows=current))
    return passes


def falls_of(steps: Steps, passes: list[Pass]) -> list[FoundFall]:
    """Every fall of the run, oldest first; also those that a recovery undid."""
    rewards: Floats = steps.column(REWARD)
    if not passes:
        return []
    last = passes[-1]
    found = {
        int(last.rows[fall.onset]): FoundFall(fall=fall, rows=last.rows, is_current=True)
        for fall in find_falls(rewards[last.rows])
    }
    current = set(last.rows.tolist())
    for one in sorted(passes[:-1], key=lambda one: one.begin - one.end)[:MOST_PASSES]:
        for fall in find_falls(rewards[one.rows]):
            row = int(one.rows[fall.onset])
            if one.begin <= row and not any(abs(row - other) <= 3 for other in found):
                found[row] = FoundFall(fall=fall, rows=one.rows, is_current=row in current)
    return [found[row] for row in sorted(found)]


def main_fall(falls: Sequence[FoundFall]) -> FoundFall | None:
    """The fall to explain: one of the run as it is now that is not over, else the last that did harm."""
    down = [one for one in falls if one.is_current and not one.fall.is_over]
    harmful = [one for one in falls if not one.is_current or one.fall.zeros >= ZERO_STREAK]
    return next(iter([*down, *reversed(harmful), *reversed(falls)]), None)


def evidence_of(contents: Contents, falls: Sequence[FoundFall], passes: Sequence[Pass]) -> HealthEvidence:
    """Of what a run's files show: its steps as they are now, and the fall among them that no recovery undid."""
    rows = passes[-1].rows if passes else np.array([], dtype=np.int64)
    origins = np.array(contents.origins, dtype=np.int64)
    seen = SeenSteps(
        steps=contents.steps.steps[rows],
        rewards=contents.steps.column(REWARD)[rows],
        origins=origins[rows] if len(origins) else origins,
        files=tuple(source.path for source in contents.sources),
        total=contents.total_steps,
        unread=tuple(source.note for source in contents.sources if source.is_unread),
        passed_over=tuple(contents.not_read),
    )
    fall = standing([one.fall for one in falls if passes and one.rows is passes[-1].rows])
    return judge(seen, fall, RestoreConfig(), source="the rewards, as read now")
