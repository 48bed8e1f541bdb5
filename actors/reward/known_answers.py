"""Known answers: a prompt, a text, and the scores that it got while all was well. The live reward function scores a few
of them with each batch; launcher/policy/canary_policy.py judges the scores.

They are given by the user (`reward.canaries`: good and bad completions), or made of the data set: a record's answer,
and the same with another number, which in every second record ends with the right one. They are scored some times when
the run begins. A function that always says the same must go on to say it; a given completion must stay on its side of
the middle between the good and the bad ones, so a judge may be noisy and answer any number. The scores are kept on
disk, so that an attempt that begins with a broken function is not misled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from actors.data.answer_shapes import with_another_number, with_more_digits
from actors.data.dataset import load_records
from actors.reward.reward_pool import Scorable, Score
from launcher.base.durable import replace_file
from launcher.base.errors import DataError, RewardError, RewardImportError
from launcher.base.rollouts import Prompt, mean_of
from launcher.config.schema import RunConfig
from launcher.policy.canary_policy import CanaryScore, is_more_than_noise

MOST_RECORDS = 8
TRIES = 2
"""A function that scores a record's answer differently each time can't be tested with it."""
TRIES_OF_GIVEN = 8
"""A given completion may be scored by a noisy judge: its mean and its side are known after so many."""
CONFIRMATIONS = 8
"""How often a known answer that was scored wrongly is scored once more, before it accuses the function."""
ANOTHER, ENDS_RIGHT = "", " that ends with the right one"
"""Kinds of a wrong answer, as its name ends: the right one's number and one, or that number with a digit before it."""
FORM = 'each line: the columns of train_dataset, "completion": a text, and "good": true or false'

log = logging.getLogger("canaries")


class AnswerScorer(Protocol):
    """A `RewardPool`."""

    async def score(self, completions: Sequence[str], prompt: Scorable) -> list[Score]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """`completion` to `prompt` must get what it got, the mean of `scores`, or with a `limit` what is on the same side
    of it."""

    name: str
    prompt: Scorable
    completion: str
    scores: tuple[float, ...] = ()
    limit: float | None = None

    @property
    def expected(self) -> float:
        first = self.scores[0]  # differences from it: the sum of large scores is no float
        return first + mean_of([one - first for one in self.scores])

    def is_wrong(self, value: float, tolerance: float = 0.0) -> bool:
        """NaN is wrong."""
        if self.limit is None:
            return not abs(value - self.expected) <= tolerance
        return not (value > self.limit if self.expected > self.limit else value < self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Of one known answer: its `scores` while all was well; how often it was `scored` since, and `wrong` by chance."""

    scores: tuple[float, ...] = ()
    scored: int = 0
    wrong: int = 0


class KeptScores:
    """Of the known answers by their names, on disk where there is a `path`."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept = {} if path is None else _read(path)

    def of(self, name: str) -> tuple[float, ...]:
        """While all was well; empty where it has not been scored."""
        return self._known(name).scores

    def learn(self, answers: Sequence[KnownAnswer]) -> None:
        if not answers:
            return
        for one in answers:
            self._kept[one.name] = replace(self._known(one.name), scores=one.scores)
        self._write()

    def error_rate(self, name: str) -> float:
        """One in a hundred, until as many scores say otherwise."""
        known = self._known(name)
        return (1 + known.wrong) / (100 + known.scored)

    def count(self, name: str, *, wrong: int, scored: int) -> None:
        """What was wrong by chance, so that a trainer that begins again knows it."""
        known = self._known(name)
        self._kept[name] = replace(known, scored=known.scored + scored, wrong=known.wrong + wrong)
        if wrong:
            self._write()

    def _known(self, name: str) -> Kept:
        return self._kept.get(name, Kept())

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, json.dumps({name: asdict(one) for name, one in self._kept.items()}).encode())
        except OSError as error:  # a full disk costs the memory of later attempts, not this one
            log.warning("canaries.not_kept path=%s reason=%r", self._path, error)


def _read(path: Path) -> dict[str, Kept]:
    try:
        kept = json.loads(path.read_text())
        return {
            str(name): Kept(**one | {"scores": tuple(map(float, one["scores"]))})
            if isinstance(one, dict)
            else Kept(scores=(float(one),))  # of a run that began with an older version
            for name, one in kept.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:  # damaged: learn again, and log it
        log.warning("canaries.unreadable path=%s reason=%r", path, error)
        return {}


# ── of the data set ──


async def learn_from_records(
    records: Sequence[Scorable], scorer: AnswerScorer, kept: KeptScores
) -> tuple[KnownAnswer, ...]:
    """Two for each of some records spread over the data set, with the scores in `kept` where they are there.

    A record is passed over where the function does not give its answer more than the wrong one, each time it is
    asked: of such a function, known answers show nothing. Raises RewardImportError and RewardError.
    """
    spread = records[:: max(1, len(records) // MOST_RECORDS)][:MOST_RECORDS]
    answers: list[KnownAnswer] = []
    for place, record in enumerate(spread):
        # a judge that compares ends alone takes the first kind of every second record for right, and is noticed; one
        # that always did so is asked for the other kind, or there would be no known answers for it
        kinds = (ENDS_RIGHT, ANOTHER) if place % 2 else (ANOTHER,)
        pairs = [pair for kind in kinds if (pair := _right_and_wrong(record, kind, kept))]
        chosen = next((pair for pair in pairs if all(one.scores for one in pair)), [])
        for pair in pairs:
            chosen = chosen or await _told_apart(pair, scorer)
        answers += chosen
    kept.learn(answers)
    return tuple(answers)


def _right_and_wrong(record: Scorable, kind: str, kept: KeptScores) -> list[KnownAnswer]:
    """Empty where one of them can't be made."""
    answer = record.answer
    if not isinstance(answer, str):
        return []
    wrong = with_more_digits(answer) if kind == ENDS_RIGHT else with_another_number(answer)
    if wrong is None:
        return []
    texts = {f"right answer of {record.id}": answer, f"wrong answer of {record.id}{kind}": wrong}
    return [
        KnownAnswer(name=name, prompt=record, completion=text, scores=kept.of(name)) for name, text in texts.items()
    ]


async def _told_apart(pair: Sequence[KnownAnswer], scorer: AnswerScorer) -> list[KnownAnswer]:
    rounds = [await scorer.score([one.completion for one in pair], pair[0].prompt) for _ in range(TRIES)]
    right, wrong = ({scores[i].value for scores in rounds} for i in range(2))
    if len(right) != 1 or len(wrong) != 1:
        return []
    (high,), (low,) = right, wrong
    if high is None or low is None or high <= low:
        return []
    return [replace(one, scores=(value,) * TRIES) for one, value in zip(pair, (high, low), strict=True)]


# ── of the user ──


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    answer: KnownAnswer
    is_good: bool


def read_given(config: RunConfig) -> list[GivenAnswer]:
    """Good and bad ones in turn; none where `reward.canaries` is null. Raises DataError."""
    if config.reward.canaries is None:
        return []
    path = Path(config.reward.canaries)
    if not path.is_file():
        raise DataError(f"reward.canaries={str(path)!r} is no file", FORM)
    dataset = replace(config.train_dataset, path=str(path), bad_records="refuse", max_items=None)
    try:
        records = load_records(dataset, key="reward.canaries")
    except DataError as error:
        raise DataError(f"reward.canaries: {error.message}", FORM) from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    sides: dict[bool, list[GivenAnswer]] = {True: [], False: []}
    for record in records:
        completion, good = record.record.get("completion"), record.record.get("good")
        if not isinstance(completion, str) or not isinstance(good, bool):
            raise DataError(
                f"reward.canaries: {record.where} has completion={completion!r:.60} and good={good!r}", FORM
            )
        name = f"{'good' if good else 'bad'} completion {path.name}:{record.where.rpartition(':')[2]} ({digest})"
        prompt = Prompt(id=record.id, token_ids=(), record=record.record, answer_key=record.answer_key)
        answer = KnownAnswer(name=name, prompt=prompt, completion=completion)
        sides[good].append(GivenAnswer(answer=answer, is_good=good))
    for good, those in sides.items():
        if not those:
            what = f"reward.canaries={str(path)!r} has no {'good' if good else 'bad'} completion"
            raise DataError(what, "give both: a function that always answers the same is right about all of one kind")
    pairs = itertools.zip_longest(sides[True], sides[False])
    return [one for pair in pairs for one in pair if one is not None]


async def learn_given(given: Sequence[GivenAnswer], scorer: AnswerScorer, kept: KeptScores) -> tuple[KnownAnswer, ...]:
    """Each with what it gets, as in `kept` from the run's first attempt. Raises RewardImportError where the function
    doesn't tell good from bad."""
    if not given:
        return ()
    is_known = all(kept.of(one.answer.name) for one in given)
    answers = [
        replace(one.answer, scores=kept.of(one.answer.name) if is_known else await _scores(one.answer, scorer))
        for one in given
    ]
    means = [
        mean_of([answer.expected for one, answer in zip(given, answers, strict=True) if one.is_good is side])
        for side in (True, False)
    ]
    limit = mean_of(means)
    answers = [replace(answer, limit=limit) for answer in answers]
    for one, answer in zip(given, answers, strict=True):
        if answer.expected == limit or (answer.expected > limit) is not one.is_good:
            raise RewardImportError(
                f"the reward function doesn't tell good from bad: {answer.name} got {answer.expected:.3g}, while on "
                f"average the good ones got {means[0]:.3g} and the bad ones {means[1]:.3g}",
                "repair the function, or correct the file of reward.canaries",
            )
    if not is_known:
        kept.learn(answers)
        for answer in answers:
            kept.count(answer.name, wrong=sum(map(answer.is_wrong, answer.scores)), scored=len(answer.scores))
    return tuple(answers)


async def _scores(answer: KnownAnswer, scorer: AnswerScorer) -> tuple[float, ...]:
    scores = await scorer.score([answer.completion] * TRIES_OF_GIVEN, answer.prompt)
    values = tuple(score.value for score in scores if score.value is not None)
    if 2 * len(values) < TRIES_OF_GIVEN:
        error = next(score.error for score in scores if score.value is None)
        what = f"reward.canaries: {answer.name} was scored {len(values)} of {TRIES_OF_GIVEN} times: {error}"
        raise RewardImportError(what, "repair the function, or correct the file")
    return values


# ── with each batch ──


def pick(answers: Sequence[KnownAnswer], count: int, step: int) -> tuple[KnownAnswer, ...]:
    """`count` of them for a step, in turn, right and wrong ones side by side: a fault that touches some records only
    is met within a few steps."""
    if not answers or count <= 0:
        return ()
    count = min(count, len(answers))
    return tuple(answers[(step * count + i) % len(answers)] for i in range(count))


class KnownRounds:
    """A few of the known answers for each step, in turn. `submit` runs a coroutine on the loop of the `scorer`."""

    def __init__(
        self,
        answers: Sequence[KnownAnswer],
        scorer: AnswerScorer,
        kept: KeptScores,
        *,
        count: int,
        submit: Callable[[Coroutine[Any, Any, tuple[CanaryScore, ...]]], Future[tuple[CanaryScore, ...]]],
        tolerance: float = 0.0,
    ) -> None:
        self._answers = answers
        self._scorer = scorer
        self._kept = kept
        self._count = count
        self._submit = submit
        self._tolerance = tolerance

    def begin(self, step: int) -> Future[tuple[CanaryScore, ...]]:
        """Scores those of a step, while the caller continues."""
        chosen = pick(self._answers, self._count, step)
        return self._submit(score_answers(chosen, self._scorer, self._kept, self._tolerance))


async def score_answers(
    answers: Sequence[KnownAnswer], scorer: AnswerScorer, kept: KeptScores | None = None, tolerance: float = 0.0
) -> tuple[CanaryScore, ...]:
    """Each scored once, side by side, and a few times more where it is wrong: a judge that errs by chance is no broken
    one. Never raises for what the reward function does: `got` is None and `error` says why. The pool gives each its
    time limit."""
    known = kept or KeptScores()
    return tuple(await asyncio.gather(*(_score(answer, scorer, known, tolerance) for answer in answers)))


async def _score(answer: KnownAnswer, scorer: AnswerScorer, kept: KeptScores, tolerance: float) -> CanaryScore:
    as_expected = CanaryScore(name=answer.name, expected=answer.expected, got=answer.expected)
    try:
        score = await _answered(answer, scorer)
        if score.value is None:
            return replace(as_expected, got=None, error=score.error)
        if not answer.is_wrong(score.value, tolerance):
            kept.count(answer.name, wrong=0, scored=1)
            return as_expected
        again = await scorer.score([answer.completion] * CONFIRMATIONS, answer.prompt)
    except (RewardError, RewardImportError) as error:
        return replace(as_expected, got=None, error=error.message)
    values = [one.value for one in again if one.value is not None]
    wrong = sum(answer.is_wrong(value, tolerance) for value in values)
    if 2 * len(values) < CONFIRMATIONS or is_more_than_noise(wrong, len(values), kept.error_rate(answer.name)):
        return replace(as_expected, name=f"{answer.name} ({1 + wrong} of {1 + len(values)} times)", got=score.value)
    kept.count(answer.name, wrong=1 + wrong, scored=1 + len(values))
    return as_expected


async def _answered(answer: KnownAnswer, scorer: AnswerScorer) -> Score:
    """A function that answers None asks for another try."""
    for _ in range(CONFIRMATIONS):
        (score,) = await scorer.score([answer.completion], answer.prompt)
        if not score.is_unanswered:
            break
    return score
