"""Is the reward function itself broken? Known answers, scored by the live function at each step, show it in one step.

A policy that collapsed and a verifier that answers 0 look the same from the rewards alone; only one of them gives a
right answer a wrong score. Items with both low and high rewards are needed: a function that always returns 1 is right
about every right answer.

Beside the known answers are the run's own: completions of healthy steps, scored again when the rewards are low
(`compare_rescored`), and their prompts, answered again by the weights of now (`compare_replayed`). Both may be noisy,
so each is one score with a tolerance of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from launcher.base.rollouts import mean_of
from launcher.base.wording import counted
from launcher.config.supervision import RewardHealthConfig

SILENT_ROUNDS = 2
"""Without a score: one may be missing since the machine was slow, and would stop a sound run."""
STANDARD_ERRORS = 4.0
"""A difference of means that is chance once in ten thousand times."""
BY_CHANCE = 1e-4
LEAST_SPREAD = 0.1
"""Standard deviation of one score, as a share of the range of rewards, that any reward function is credited with."""
LAST_ATTEMPT_BROKE = "the last attempt ended with a broken reward function; known answers are asked again"
"""The whole of what a new attempt says before its first round: by then the function may be repaired."""
SOONEST_S, LATEST_S = 0.3, 10.0
"""Between two rounds of known answers while the trainer is paused for a broken reward function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScore:
    """One known answer as scored now; `got` is None where the function raised or did not answer in time. `error`: why,
    or what else is known of it.

    `tolerance`: a difference that is none, where that is more than reward_health.canary_tolerance. `steps`: of which
    steps the prompts are that were answered again, one for each. `stands_for`: so many answers, whose mean it is.
    """

    name: str
    expected: float
    got: float | None
    error: str = ""
    tolerance: float = 0.0
    steps: tuple[int, ...] = ()
    stands_for: int = 1

    @property
    def is_low(self) -> bool:
        return self.got is not None and self.got < self.expected - self.tolerance

    @property
    def errors_low(self) -> float:
        """By how many standard errors it is lower than expected; 0 where that is not known."""
        if self.got is None or not self.tolerance:
            return 0.0
        return (self.expected - self.got) / (self.tolerance / STANDARD_ERRORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRound:
    """All known answers scored once, for the batch of one step."""

    step: int
    scores: Sequence[CanaryScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryVerdict:
    """`onset_step`: the first step that accuses it, None where not broken."""

    is_broken: bool
    reason: str
    onset_step: int | None = None


def judge_canaries(rounds: Sequence[CanaryRound], settings: RewardHealthConfig) -> CanaryVerdict:
    """The verdict on the last rounds, oldest first; while training is paused they continue at the same step.

    One wrong score is enough evidence, and only `canary_clear_rounds` sound rounds in a row clear it: a function that
    errs now and then is right now and then. A missing score may be a slow machine, and its batch is rejected anyway:
    it is evidence after SILENT_ROUNDS in a row.
    """
    if not any(one.scores for one in rounds):
        return CanaryVerdict(is_broken=False, reason="no known answers were scored")
    wrong = _still_accusing(rounds, settings)
    if wrong:
        texts = [_score_text(score) for score in wrong[-1].scores if _is_wrong(score, settings)]
        return CanaryVerdict(is_broken=True, reason=_summary(texts), onset_step=wrong[0].step)
    silent = list(itertools.takewhile(lambda one: any(score.got is None for score in one.scores), reversed(rounds)))
    if len(silent) >= SILENT_ROUNDS:
        texts = [_score_text(score) for score in silent[0].scores if score.got is None]
        reason = f"{counted(len(silent), 'time')} in a row: {_summary(texts)}"
        return CanaryVerdict(is_broken=True, reason=reason, onset_step=silent[-1].step)
    return CanaryVerdict(is_broken=False, reason="known answers scored as they should be")


def is_sound(one: CanaryRound, settings: RewardHealthConfig) -> bool:
    """Every known answer was scored, and as it should be."""
    return all(score.got is not None and not _is_wrong(score, settings) for score in one.scores)


def until_next_round_s(paused_s: float) -> float:
    """After a wrong one, a tenth of the pause so far: a short fault costs little, and a long one asks a judge that is
    paid for seldom (97 rounds in 10 minutes)."""
    return min(max(paused_s / 10, SOONEST_S), LATEST_S)


def may_be_tried(one: CanaryRound, settings: RewardHealthConfig, *, paused_s: float, failing_s: float) -> bool:
    """The step that failed for want of a reward, after this round. Where there are no known answers only the step can
    tell: it is tried `paused_s` after the last time, where that is as long as it had failed by then (`failing_s`), or a
    function that never answers would be an incident every few seconds, each told to be over."""
    return is_sound(one, settings) and (len(one.scores) > 0 or paused_s >= failing_s)


def is_more_than_noise(wrong: int, scored: int, rate: float) -> bool:
    """Would a known answer that is scored wrongly at this `rate` be so `wrong` of so many by chance less than once in
    ten thousand times?"""
    if not 0 < rate < 1:
        return wrong > 0 and rate <= 0
    logs = (math.log(rate), math.log1p(-rate))  # from 1,030 scores on the number of ways is larger than any float
    chances = (math.exp(_ways(scored, n) + n * logs[0] + (scored - n) * logs[1]) for n in range(wrong, scored + 1))
    return wrong > 0 and math.fsum(chances) < BY_CHANCE


def _ways(scored: int, wrong: int) -> float:
    """The logarithm of how many choices of `wrong` there are among `scored`."""
    return math.lgamma(scored + 1) - math.lgamma(wrong + 1) - math.lgamma(scored - wrong + 1)


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
    tolerance = max(settings.canary_tolerance, score.tolerance)
    return score.got is not None and not abs(score.got - score.expected) <= tolerance


def _summary(texts: Sequence[str]) -> str:
    """The first one, and how many more."""
    return texts[0] if len(texts) == 1 else f"{texts[0]}, and {len(texts) - 1} more like it"


def _score_text(score: CanaryScore) -> str:
    were = "was" if score.stands_for == 1 else "were"
    if score.got is None:
        return f"{score.name} {were} not scored{f' ({score.error})' if score.error else ''}"
    return score.error or f"{score.name} {were} scored {score.got:.3g}, not {score.expected:.3g}"


# ── the run's own ──


def compare_rescored(earlier: Sequence[Sequence[float]], now: Sequence[float | None], error: str = "") -> CanaryScore:
    """Completions that were scored several times each while all was well, and once `now`. `error`: why one was not.

    Those that were not scored say nothing, unless they are half of them: a function that fails now and then is no
    other than it was.
    """
    scored = [(then, (one,)) for then, one in zip(earlier, now, strict=True) if one is not None]
    if 2 * len(scored) <= len(earlier):
        name = counted(len(earlier), "completion", more=" of healthy steps")
        expected = _mean_of_means(earlier)
        return CanaryScore(name=name, expected=expected, got=None, error=error, stands_for=len(earlier))
    name = counted(len(scored), "completion", more=" of healthy steps")
    return _compared(name, [then for then, _ in scored], [one for _, one in scored])


def compare_replayed(
    earlier: Sequence[Sequence[float]], now: Sequence[Sequence[float]], steps: Sequence[int] = ()
) -> CanaryScore:
    """The rewards of some prompts' samples in healthy `steps`, and those of new samples of the same prompts."""
    name = counted(len(earlier), "prompt", more=" of healthy steps")
    return replace(_compared(name, earlier, now), steps=tuple(steps))


def explains(replayed: CanaryScore | None, drop: float | None) -> bool:
    """Do old prompts earn what they earned, so that weights, servers and reward function can't explain a `drop`?

    Only where the figures are sharp enough to tell: by two standard errors less than half of it is seen in them.
    """
    if replayed is None or replayed.got is None or drop is None:
        return False
    error = replayed.tolerance / STANDARD_ERRORS
    return replayed.expected - replayed.got + 2 * error < drop / 2


def _compared(name: str, earlier: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> CanaryScore:
    """Mean of the items' means, then and now; the spread of one score is pooled over all items."""
    rewards = [one for scores in (*earlier, *now) for one in scores]
    floor = LEAST_SPREAD * ((max(rewards) - min(rewards)) or 1.0)
    try:
        spreads = [variance(scores) for scores in (*earlier, *now) if len(scores) > 1]
        pooled = max(fmean(spreads) if spreads else 0.0, floor**2)
    except OverflowError:  # rewards of 1e308 are no reading of anything
        expected = _mean_of_means(earlier)
        return CanaryScore(name=name, expected=expected, got=math.nan, stands_for=len(earlier))
    weights = sum(1 / len(a) + 1 / len(b) for a, b in zip(earlier, now, strict=True))
    return CanaryScore(
        name=name,
        expected=_mean_of_means(earlier),
        got=_mean_of_means(now),
        tolerance=STANDARD_ERRORS * math.sqrt(pooled * weights) / len(earlier),
        stands_for=len(earlier),
    )


def _mean_of_means(items: Sequence[Sequence[float]]) -> float:
    return mean_of([mean_of(scores) for scores in items])
