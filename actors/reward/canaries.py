"""Known answers, scored by the live reward function with each batch (launcher/policy/canary_policy.py judges the
scores).

They are given by the user (`known_completions`), or made from the data set: a record's answer must keep the reward
that it gets when the run begins, and the same answer with another number must keep getting less. In every second
record that number ends with the right one. The expected rewards are learnt once and kept on disk, so that an attempt
that begins with a broken function is not misled.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from actors.data.answer_shapes import with_another_number, with_more_digits
from actors.reward.reward_pool import Scorable, Score
from launcher.base.durable import replace_file
from launcher.base.errors import RewardError, RewardImportError
from launcher.policy.canary_policy import CanaryScore, is_more_than_noise

MOST_RECORDS = 8
TRIES = 2
"""A function that scores the same item differently each time can't be tested with it."""
CONFIRMATIONS = 8
"""How often a known answer that was scored wrongly is scored once more, before it accuses the function."""
WRONG = "wrong: "
ANOTHER, ENDS_RIGHT = "", " that ends with the right one"
"""Kinds of a wrong answer, as its name ends: the right one's number and one, or that number with a digit before it."""

log = logging.getLogger("canaries")


class CanaryScorer(Protocol):
    """A `RewardPool`."""

    async def score(self, completions: Sequence[str], prompt: Scorable) -> list[Score]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """`completion` to the record `prompt` must get `expected`, or with a `limit` what is on the same side of it."""

    name: str
    prompt: Scorable
    completion: str
    expected: float
    limit: float | None = None

    def is_wrong(self, value: float, tolerance: float = 0.0) -> bool:
        """NaN is wrong."""
        if self.limit is None:
            return not abs(value - self.expected) <= tolerance
        return not (value > self.limit if self.expected > self.limit else value < self.limit)


async def make_canaries(records: Sequence[Scorable], scorer: CanaryScorer, *, keep_in: Path) -> tuple[Canary, ...]:
    """Two for each of some records spread over the data set; of those kept in `keep_in`, the expectations kept there.

    A record is passed over where the function does not give its answer more than the wrong one, each time it is
    asked: of such a function, known answers show nothing. Raises RewardImportError and RewardError.
    """
    spread = records[:: max(1, len(records) // MOST_RECORDS)][:MOST_RECORDS]
    known = read_kept(keep_in)
    canaries: list[Canary] = []
    for place, record in enumerate(spread):
        # a judge that compares ends alone takes the first kind of every second record for right, and is noticed; one
        # that always did so is asked for the other kind, or there would be no known answers for it
        kinds = (ENDS_RIGHT, ANOTHER) if place % 2 else (ANOTHER,)
        texts = [two for kind in kinds if (two := _texts(record, kind))]
        pair = next((_made(record, two, known) for two in texts if two.keys() <= known.keys()), [])
        for two in texts:
            pair = pair or await _learn(record, two, scorer)
        canaries += pair
    if canaries:
        keep(keep_in, known | {canary.name: canary.expected for canary in canaries})
    return tuple(canaries)


def pick(canaries: Sequence[Canary], count: int, step: int) -> tuple[Canary, ...]:
    """`count` of them for a step, in turn, right and wrong ones side by side: a fault that touches some records only
    is met within a few steps."""
    if not canaries or count <= 0:
        return ()
    count = min(count, len(canaries))
    return tuple(canaries[(step * count + i) % len(canaries)] for i in range(count))


class ErrorRates:
    """How often each known answer was scored wrongly by chance. What was wrong is kept in `keep_in`, so that a trainer
    that begins again knows it."""

    def __init__(self, keep_in: Path | None = None) -> None:
        self._path = keep_in
        kept = {} if keep_in is None else read_kept(keep_in)
        self._wrong = Counter({name.removeprefix(WRONG): int(n) for name, n in kept.items() if name.startswith(WRONG)})
        self._scored = Counter({name: int(n) for name, n in kept.items() if not name.startswith(WRONG)})

    def of(self, name: str) -> float:
        """One in a hundred, until as many scores say otherwise."""
        return (1 + self._wrong[name]) / (100 + self._scored[name])

    def add(self, name: str, *, wrong: int, scored: int) -> None:
        self._wrong[name] += wrong
        self._scored[name] += scored
        if wrong and self._path is not None:
            keep(self._path, {**self._scored, **{WRONG + one: n for one, n in self._wrong.items()}})


async def score_canaries(
    canaries: Sequence[Canary], scorer: CanaryScorer, rates: ErrorRates | None = None, tolerance: float = 0.0
) -> tuple[CanaryScore, ...]:
    """Each scored once, side by side, and a few times more where it is wrong: a judge that errs by chance is no broken
    one. Never raises for what the reward function does: `got` is None and `error` says why. The pool gives each its
    time limit."""
    known = rates or ErrorRates()
    return tuple(await asyncio.gather(*(_score(canary, scorer, known, tolerance) for canary in canaries)))


class CanaryRounds:
    """A few of the known answers for each step, in turn. `submit` runs a coroutine on the loop of the `scorer`."""

    def __init__(
        self,
        canaries: Sequence[Canary],
        scorer: CanaryScorer,
        *,
        count: int,
        submit: Callable[[Coroutine[Any, Any, tuple[CanaryScore, ...]]], Future[tuple[CanaryScore, ...]]],
        rates: ErrorRates,
        tolerance: float = 0.0,
        doubt: str = "",
    ) -> None:
        """`doubt`: what is said beside a wrong score, "" for nothing (actors/reward/reward_source.py)."""
        self._canaries = canaries
        self._scorer = scorer
        self._count = count
        self._submit = submit
        self._tolerance = tolerance
        self._rates = rates
        self._doubt = doubt

    def begin(self, step: int) -> Future[tuple[CanaryScore, ...]]:
        """Scores those of a step, while the caller continues."""
        chosen = pick(self._canaries, self._count, step)
        return self._submit(self._scored(chosen))

    async def _scored(self, chosen: Sequence[Canary]) -> tuple[CanaryScore, ...]:
        scores = await score_canaries(chosen, self._scorer, self._rates, self._tolerance)
        return tuple(map(self._doubted, scores)) if self._doubt else scores

    def _doubted(self, score: CanaryScore) -> CanaryScore:
        if score.got is None or score.got == score.expected:
            return score
        return replace(score, error=f"{score.name} was scored {score.got:.3g}, not {score.expected:.3g}; {self._doubt}")


async def _score(canary: Canary, scorer: CanaryScorer, rates: ErrorRates, tolerance: float) -> CanaryScore:
    as_expected = CanaryScore(name=canary.name, expected=canary.expected, got=canary.expected)
    try:
        score = await _answered(canary, scorer)
        if score.value is None:
            return replace(as_expected, got=None, error=score.error)
        if not canary.is_wrong(score.value, tolerance):
            rates.add(canary.name, wrong=0, scored=1)
            return as_expected
        again = await scorer.score([canary.completion] * CONFIRMATIONS, canary.prompt)
    except (RewardError, RewardImportError) as error:
        return replace(as_expected, got=None, error=error.message)
    values = [one.value for one in again if one.value is not None]
    wrong = sum(canary.is_wrong(value, tolerance) for value in values)
    if 2 * len(values) < CONFIRMATIONS or is_more_than_noise(wrong, len(values), rates.of(canary.name)):
        return replace(as_expected, name=f"{canary.name} ({1 + wrong} of {1 + len(values)} times)", got=score.value)
    rates.add(canary.name, wrong=1 + wrong, scored=1 + len(values))
    return as_expected


async def _answered(canary: Canary, scorer: CanaryScorer) -> Score:
    """A function that answers None asks for another try."""
    for _ in range(CONFIRMATIONS):
        (score,) = await scorer.score([canary.completion], canary.prompt)
        if not score.is_unanswered:
            break
    return score


def _texts(record: Scorable, kind: str) -> dict[str, str]:
    """The right and a wrong completion by the canary's name; empty where one of them can't be made."""
    answer = record.answer
    if not isinstance(answer, str):
        return {}
    wrong = with_more_digits(answer) if kind == ENDS_RIGHT else with_another_number(answer)
    if wrong is None:
        return {}
    return {f"right answer of {record.id}": answer, f"wrong answer of {record.id}{kind}": wrong}


def _made(record: Scorable, texts: Mapping[str, str], rewards: Mapping[str, float]) -> list[Canary]:
    return [Canary(name=name, prompt=record, completion=texts[name], expected=rewards[name]) for name in texts]


async def _learn(record: Scorable, texts: Mapping[str, str], scorer: CanaryScorer) -> list[Canary]:
    rounds = [await scorer.score(list(texts.values()), record) for _ in range(TRIES)]
    right, wrong = ({scores[i].value for scores in rounds} for i in range(2))
    if len(right) != 1 or len(wrong) != 1:
        return []
    (high,), (low,) = right, wrong
    if high is None or low is None or high <= low:
        return []
    return _made(record, texts, dict(zip(texts, (high, low), strict=True)))


def read_kept(path: Path) -> dict[str, float]:
    try:
        kept = json.loads(path.read_text())
        return {str(name): float(value) for name, value in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:  # damaged: learn again, and log it
        log.warning("canaries.unreadable path=%s reason=%r", path, error)
        return {}


def keep(path: Path, expected: Mapping[str, float]) -> None:
    try:
        replace_file(path, json.dumps(dict(expected), indent=1).encode())
    except OSError as error:  # a full disk costs the memory of later attempts, not this one
        log.warning("canaries.not_kept path=%s reason=%r", path, error)
