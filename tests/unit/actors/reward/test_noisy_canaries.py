"""Known answers of a judge that errs by chance: it is not called broken, and one that breaks still is, at once."""

import asyncio
import random

import pytest

from actors.reward.canaries import Canary, ErrorRates, pick, score_canaries
from actors.reward.reward_pool import Score
from launcher.base.rollouts import Prompt
from launcher.config.supervision import GateConfig, RewardHealthConfig
from launcher.policy.canary_policy import CanaryRound, is_more_than_noise, judge_canaries

SETTINGS = RewardHealthConfig()
ITEMS = tuple(
    Canary(
        name=f"{kind} answer of p{i}",
        prompt=Prompt(id=f"p{i}", token_ids=(), record={"answer": "x"}),
        completion=kind,
        expected=float(kind == "right"),
    )
    for i in range(8)
    for kind in ("right", "wrong")
)


class Judge:
    """Right but for a share of its scores; `silent` of them are None."""

    def __init__(self, seed, errs, silent=0.0):
        self.errs, self.silent, self.rng = errs, silent, random.Random(seed)

    async def score(self, completions, prompt):
        return [self.one(text) for text in completions]

    def one(self, text):
        if self.rng.random() < self.silent:
            return Score(value=None, error="judge gave no answer (None)", is_unanswered=True)
        return Score(value=float((text == "right") != (self.rng.random() < self.errs)))


def first_accused(judge, steps, rates=None):
    """The step at which the rounds so far call it broken; None where they never do."""
    rates = rates or ErrorRates()
    rounds = []
    for step in range(steps):
        chosen = pick(ITEMS, GateConfig().canaries, step)
        scores = asyncio.run(score_canaries(chosen, judge, rates, SETTINGS.canary_tolerance))
        rounds = [*rounds, CanaryRound(step=step, scores=scores)][-20:]
        if judge_canaries(rounds, SETTINGS).is_broken:
            return step
    return None


@pytest.mark.slow
@pytest.mark.parametrize("errs", [0.01, 0.001])
def test_a_judge_that_is_right_99_percent_of_the_time_is_not_called_broken(errs):
    assert [first_accused(Judge(seed, errs), 200) for seed in range(10)] == [None] * 10


def test_one_that_often_has_no_answer_is_not_called_broken():
    assert [first_accused(Judge(seed, 0.0, silent=0.1), 100) for seed in range(5)] == [None] * 5


@pytest.mark.parametrize("errs", [1.0, 0.8])
def test_one_that_breaks_is_named_in_its_first_round(errs):
    for seed in range(20):
        assert first_accused(Judge(seed, errs), 1) == 0


def test_one_that_begins_to_err_now_and_then_is_named_within_a_few_steps():
    for seed in range(20):
        rates = ErrorRates()
        assert first_accused(Judge(seed, 0.01), 50, rates) is None
        assert first_accused(Judge(seed, 0.3), 25, rates) is not None


def test_the_reason_says_how_often_it_was_wrong():
    (score,) = asyncio.run(score_canaries(ITEMS[:1], Judge(0, 1.0)))
    assert (score.name, score.got) == ("right answer of p0 (9 of 9 times)", 0.0)


def test_how_many_wrong_scores_are_more_than_noise():
    assert [is_more_than_noise(wrong, 8, 0.01) for wrong in (0, 1, 2, 3, 8)] == [False, False, False, True, True]
    assert not is_more_than_noise(3, 8, 0.1)
