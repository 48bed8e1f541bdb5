"""Does a reward function give right answers more than wrong ones? The data's own answers show it before the first step.

An alarm in a thread, a swallowed exception or a parser of another form rewards nothing, and a run of zeros looks like a
task that is hard. What can't be asked is said to be unchecked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from actors.data.answer_shapes import SHAPES, Pair, pairs_of
from actors.data.dataset import DataRecord
from actors.reward.canaries import CanaryScorer
from actors.reward.reward_pool import Score
from launcher.base.errors import RewardImportError
from launcher.base.wording import counted

MOST_RECORDS = 8
OTHERS = 16
"""Records whose answers may stand for a wrong one."""
WITHIN_S = 60.0
"""A judge that takes seconds for each answer must not hold a start up for longer."""
REMEDY = "give reward.canaries, completions known to be good or bad, or repair the function"


@dataclass
class _Asked:
    """What the right and the wrong answers of the records got, in each shape; None: no score."""

    right: dict[str, list[Score]] = field(default_factory=dict)
    wrong: dict[str, list[Score]] = field(default_factory=dict)


def try_reward(records: Sequence[DataRecord], scorer: CanaryScorer, *, key: str, within_s: float = WITHIN_S) -> str:
    """What is to be said of the function, "" where it gives right answers more. Raises RewardImportError where a right
    answer gets no score in any shape, or what the function answers is no reward.

    Shape by shape, until one tells right from wrong: most functions know the first.
    """
    spread = records[:: max(1, len(records) // MOST_RECORDS)][:MOST_RECORDS]
    others = [one.answer for one in records[:: max(1, len(records) // OTHERS)]][:OTHERS]
    pairs = [(record, shapes) for record in spread if (shapes := pairs_of(record.answer, others))]
    unchecked = f"{key}: whether reward.fn gives right answers more than wrong ones could not be checked"
    if not pairs:
        return f"{unchecked}, as no right and wrong completion can be made of its answers; {REMEDY}"
    asked = _Asked()
    try:
        if asyncio.run(asyncio.wait_for(_tell_apart(pairs, scorer, asked), within_s)):
            return ""
    except TimeoutError:
        return f"{unchecked} within {within_s:g} s; {REMEDY}"
    _refuse_unscored(pairs, asked)
    best = max(asked.right, key=lambda shape: _mean(asked.right[shape]))
    return (
        f"{key}: reward.fn gives right answers no more than wrong ones: those of {counted(len(pairs), 'record')}, "
        f"written in {len(SHAPES)} forms ({', '.join(SHAPES)}), got {_mean(asked.right[best]):.3g} on average at best, "
        f"and wrong ones {_mean(asked.wrong[best]):.3g}. If it reads another form: {REMEDY}"
    )


async def _tell_apart(
    pairs: Sequence[tuple[DataRecord, Mapping[str, Pair]]], scorer: CanaryScorer, asked: _Asked
) -> bool:
    for shape in SHAPES:
        texts = [[shapes[shape].right, shapes[shape].wrong] for _, shapes in pairs]
        scores = await asyncio.gather(
            *(scorer.score(two, record) for two, (record, _) in zip(texts, pairs, strict=True))
        )
        asked.right[shape] = [right for right, _ in scores]
        asked.wrong[shape] = [wrong for _, wrong in scores]
        for one in (*asked.right[shape], *asked.wrong[shape]):
            if one.is_no_reward:
                raise RewardImportError(one.error, "it answers a finite number, a dict of parts, or None")
        both = [(r.value, w.value) for r, w in scores if r.value is not None and w.value is not None]
        is_told = bool(both) and fmean(r for r, _ in both) > fmean(w for _, w in both)
        if is_told and all(one.value is not None for one in asked.right[shape]):
            return True
    return False


def _refuse_unscored(pairs: Sequence[tuple[DataRecord, Mapping[str, Pair]]], asked: _Asked) -> None:
    for place, (record, _) in enumerate(pairs):
        scores = [scores[place] for scores in asked.right.values()]
        if all(one.value is None for one in scores):
            raise RewardImportError(
                f"reward.fn gives no score to the right answer of {record.where}, in none of "
                f"{counted(len(scores), 'form')}: {scores[0].error}",
                "let it return a number (a `return` may be missing); None means that there is no answer, and the "
                "completion is made anew",
            )


def _mean(scores: Sequence[Score]) -> float:
    return fmean([one.value for one in scores if one.value is not None] or [0.0])
