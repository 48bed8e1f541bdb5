"""Completions that the user knows to be good or bad (`reward.canaries`): known answers for any reward function.

What each gets is learnt by scoring it some times when the run begins. From then on a good one must get more than the
middle between the good and the bad ones, a bad one less: so a judge may be noisy, and answer any number.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from actors.data.dataset import load_records
from actors.reward.canaries import Canary, CanaryScorer, ErrorRates, keep, read_kept
from launcher.base.errors import DataError, RewardImportError
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig

TRIES = 8
FORM = 'each line: the columns of train_dataset, "completion": a text, and "good": true or false'


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCompletion:
    name: str
    prompt: Prompt
    completion: str
    is_good: bool


def read_known(config: RunConfig) -> list[KnownCompletion]:
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
    sides: dict[bool, list[KnownCompletion]] = {True: [], False: []}
    for record in records:
        completion, good = record.record.get("completion"), record.record.get("good")
        if not isinstance(completion, str) or not isinstance(good, bool):
            raise DataError(
                f"reward.canaries: {record.where} has completion={completion!r:.60} and good={good!r}", FORM
            )
        name = f"{'good' if good else 'bad'} completion {path.name}:{record.where.rpartition(':')[2]} ({digest})"
        prompt = Prompt(id=record.id, token_ids=(), record=record.record, answer_key=record.answer_key)
        sides[good].append(KnownCompletion(name=name, prompt=prompt, completion=completion, is_good=good))
    for good, those in sides.items():
        if not those:
            what = f"reward.canaries={str(path)!r} has no {'good' if good else 'bad'} completion"
            raise DataError(what, "give both: a function that always answers the same is right about all of one kind")
    pairs = itertools.zip_longest(sides[True], sides[False])
    return [one for pair in pairs for one in pair if one is not None]


async def learn_known(
    known: Sequence[KnownCompletion], scorer: CanaryScorer, rates: ErrorRates, *, keep_in: Path | None = None
) -> tuple[Canary, ...]:
    """Each with what it gets, as kept in `keep_in` from the run's first attempt. Raises RewardImportError where the
    function doesn't tell good from bad."""
    kept = {} if keep_in is None else read_kept(keep_in)
    values: dict[str, list[float]] = {}
    if any(one.name not in kept for one in known):
        values = {one.name: await _values(one, scorer) for one in known}
        kept |= {name: fmean(got) for name, got in values.items()}
    if not known:
        return ()
    good, bad = (fmean(kept[one.name] for one in known if one.is_good is side) for side in (True, False))
    limit = (good + bad) / 2
    canaries = tuple(
        Canary(name=one.name, prompt=one.prompt, completion=one.completion, expected=kept[one.name], limit=limit)
        for one in known
    )
    for one, canary in zip(known, canaries, strict=True):
        if canary.expected == limit or (canary.expected > limit) is not one.is_good:
            raise RewardImportError(
                f"the reward function doesn't tell good from bad: {one.name} got {canary.expected:.3g}, while on "
                f"average the good ones got {good:.3g} and the bad ones {bad:.3g}",
                "repair the function, or correct the file of reward.canaries",
            )
        rates.add(
            one.name, wrong=sum(map(canary.is_wrong, values.get(one.name, []))), scored=len(values.get(one.name, []))
        )
    if values and keep_in is not None:
        keep(keep_in, kept)
    return canaries


async def _values(one: KnownCompletion, scorer: CanaryScorer) -> list[float]:
    scores = await scorer.score([one.completion] * TRIES, one.prompt)
    values = [score.value for score in scores if score.value is not None]
    if 2 * len(values) < TRIES:
        error = next(score.error for score in scores if score.value is None)
        what = f"reward.canaries: {one.name} was scored {len(values)} of {TRIES} times: {error}"
        raise RewardImportError(what, "repair the function, or correct the file")
    return values
