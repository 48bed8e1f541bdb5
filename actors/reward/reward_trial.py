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
from actors.reward.known_answers import AnswerScorer
from actors.reward.reward_pool import Score
from launcher.base.errors import RewardImportError
from launcher.base.wording import counted

MOST_RECORDS = 8
OTHERS = 16
"""Records whose answers may stand for a wrong one."""
WITHIN_S = 60.0
"""A judge that takes seconds for each answer must not hold a start up for longer."""
TRIES = 3
"""More, for a right answer without a score where others have one: a judge may be busy for a moment."""
REMEDY = "give reward.canaries, completions known to be good or bad, or repair the function"


@dataclass
class _Asked:
    """What the right and the wrong answers of the records got, in each shape, and in which shapes the right ones got
    more."""

    right: dict[str, list[Score]] = field(default_factory=dict)
    wrong: dict[str, list[Score]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def try_reward(records: Sequence[DataRecord], scorer: AnswerScorer, *, key: str, within_s: float = WITHIN_S) -> str:
    """What is to be said of the function, "" where it gives right answers more. Raises RewardImportError where a right
    answer gets no score, or what the function answers is no reward.

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
    if asked.told:
        return ""
    both = [shape for shape in SHAPES if any(_pairs(asked, shape))]
    if not both:
        reason = next(one.error for one in asked.wrong[next(iter(SHAPES))] if one.value is None)
        return (
            f"{key}: reward.fn gives no score to wrong answers, where right ones get one: {reason}. A completion "
            "without a score is made anew, so that none but right ones would be trained on; let it return a number"
        )
    best = max(both, key=lambda shape: _means(asked, shape)[0])
    right, wrong = _means(asked, best)
    return (
        f"{key}: reward.fn gives right answers no more than wrong ones: those of {counted(len(pairs), 'record')}, "
        f"written in {len(SHAPES)} forms ({', '.join(SHAPES)}), got {right:.3g} on average at best, "
        f"and wrong ones {wrong:.3g}. If it reads another form: {REMEDY}"
    )


async def _tell_apart(
    pairs: Sequence[tuple[DataRecord, Mapping[str, Pair]]], scorer: AnswerScorer, asked: _Asked
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
        if not any(_pairs(asked, shape)):
            continue
        await _ask_again(pairs, scorer, shape, asked.right[shape])
        right, wrong = _means(asked, shape)
        if right > wrong:
            asked.told.append(shape)
            if all(one.value is not None for one in asked.right[shape]):
                return True
    return False


async def _ask_again(
    pairs: Sequence[tuple[DataRecord, Mapping[str, Pair]]], scorer: AnswerScorer, shape: str, right: list[Score]
) -> None:
    """None asks for another try, which may have an answer."""
    for place, (record, shapes) in enumerate(pairs):
        for _ in range(TRIES):
            if right[place].is_unanswered:
                (right[place],) = await scorer.score([shapes[shape].right], record)


def _refuse_unscored(pairs: Sequence[tuple[DataRecord, Mapping[str, Pair]]], asked: _Asked) -> None:
    """A right answer that is never told from the wrong one, and gets no score in a form that the function reads: it
    tells those of other records apart in it, or scores the wrong one."""
    for place, (record, _) in enumerate(pairs):
        both = [(asked.right[shape][place], asked.wrong[shape][place]) for shape in SHAPES]
        if any(r.value is not None and w.value is not None and r.value > w.value for r, w in both):
            continue
        of_told = [asked.right[shape][place] for shape in asked.told]
        lacks = [right for right, _ in both if right.value is None]
        beside = [right for right, wrong in both if right.value is None and wrong.value is not None]
        without = [right for right in of_told if right.value is None] or beside
        if len(lacks) < len(both) and not without:
            continue
        where = f"in none of {counted(len(both), 'form')}" if len(lacks) == len(both) else "in the form that it reads"
        raise RewardImportError(
            f"reward.fn gives no score to the right answer of {record.where}, {where}: {(without or lacks)[0].error}",
            "let it return a number (a `return` may be missing); None means that there is no answer, and the "
            "completion is made anew",
        )


def _pairs(asked: _Asked, shape: str) -> list[tuple[float, float]]:
    """Of the records of which both have a score."""
    both = zip(asked.right[shape], asked.wrong[shape], strict=True)
    return [(r.value, w.value) for r, w in both if r.value is not None and w.value is not None]


def _means(asked: _Asked, shape: str) -> tuple[float, float]:
    """Of right and of wrong ones."""
    both = _pairs(asked, shape)
    return fmean(right for right, _ in both), fmean(wrong for _, wrong in both)
