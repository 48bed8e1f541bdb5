"""Is the reward function itself broken? Known answers, scored by the live function at each step, show it in one step.

A policy that collapsed and a verifier that answers 0 look the same from the rewards alone; only one of them gives a
right answer a wrong score. Items with both low and high rewards are needed: a function that always returns 1 is right
about every right answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.supervision import RewardHealthConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScore:
    """One known answer as scored now; `got` is None where the function raised or did not answer in time."""

    name: str
    expected: float
    got: float | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRound:
    """All known answers scored once, for the batch of one step."""

    step: int
    scores: Sequence[CanaryScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """`onset_step`: the first step that accuses it, None where not broken. `is_known` is False where there was
    nothing to judge by: such a verdict clears nobody."""

    is_broken: bool
    is_known: bool
    reason: str
    onset_step: int | None = None


def judge_canaries(rounds: Sequence[CanaryRound], settings: RewardHealthConfig) -> CanaryVerdict:
    """The verdict on the last rounds, oldest first; while training is paused they continue at the same step.

    One wrong score is enough evidence, and only `canary_clear_rounds` sound rounds in a row clear it: a function that
    errs now and then is right now and then. A missing score may be a slow machine, and its batch is rejected anyway:
    it is evidence after `canary_silent_rounds` in a row.
    """
    if not any(one.scores for one in rounds):
        return CanaryVerdict(is_broken=False, is_known=False, reason="no known answers were scored")
    wrong = _still_accusing(rounds, settings)
    if wrong:
        texts = [_score_text(score) for score in wrong[-1].scores if _is_wrong(score, settings)]
        return CanaryVerdict(is_broken=True, is_known=True, reason=_summary(texts), onset_step=wrong[0].step)
    silent = list(itertools.takewhile(lambda one: any(score.got is None for score in one.scores), reversed(rounds)))
    if len(silent) >= settings.canary_silent_rounds:
        texts = [_score_text(score) for score in silent[0].scores if score.got is None]
        reason = f"{len(silent)} times in a row: {_summary(texts)}"
        return CanaryVerdict(is_broken=True, is_known=True, reason=reason, onset_step=silent[-1].step)
    return CanaryVerdict(is_broken=False, is_known=True, reason="known answers scored as they should be")


def is_sound(one: CanaryRound, settings: RewardHealthConfig) -> bool:
    """Every known answer was scored, and as it should be."""
    return all(score.got is not None and not _is_wrong(score, settings) for score in one.scores)


def _still_accusing(rounds: Sequence[CanaryRound], settings: RewardHealthConfig) -> list[CanaryRound]:
    """The rounds with a wrong score that nothing has cleared since, oldest first."""
    accusing: list[CanaryRound] = []
    sound_in_a_row = 0
    for one in reversed(rounds):
        if any(_is_wrong(score, settings) for score in one.scores):
            accusing.insert(0, one)
            sound_in_a_row = 0
        elif all(score.got is not None for score in one.scores):
            sound_in_a_row += 1
        if sound_in_a_row >= settings.canary_clear_rounds:
            break
    return accusing


def _is_wrong(score: CanaryScore, settings: RewardHealthConfig) -> bool:
    # Written so that NaN is wrong.
    return score.got is not None and not abs(score.got - score.expected) <= settings.canary_tolerance


def _summary(texts: Sequence[str]) -> str:
    """The first one, and how many more."""
    return texts[0] if len(texts) == 1 else f"{texts[0]}, and {len(texts) - 1} more like it"


def _score_text(score: CanaryScore) -> str:
    if score.got is None:
        return f"{score.name} was not scored{f' ({score.error})' if score.error else ''}"
    return f"{score.name} was scored {score.got:g}, not {score.expected:g}"
