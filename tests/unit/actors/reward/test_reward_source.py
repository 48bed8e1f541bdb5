"""A reward function that was changed between two attempts is told apart from one that broke, as far as that is seen."""

import asyncio

import pytest

from actors.reward.canaries import CanaryRounds, ErrorRates, make_canaries, read_kept
from actors.reward.reward_pool import Score
from actors.reward.reward_source import doubt_of
from launcher.base.rollouts import Prompt
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import CanaryRound, judge_canaries

RECORD = Prompt(id="7", token_ids=(1,), record={"answer": "42"})


class Scorer:
    """`right`: the reward of a right answer."""

    def __init__(self, right):
        self.right = right

    async def score(self, completions, prompt):
        return [Score(value=self.right if text == prompt.answer else 0.0) for text in completions]


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Begins an attempt with a function whose file and results are given; what its first round shows."""
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = tmp_path / "canaries.json"

    def begin(source, right, fn="mine:score"):
        (tmp_path / "mine.py").write_text(source)
        scorer = Scorer(right)
        canaries = asyncio.run(make_canaries([RECORD], scorer, keep_in=kept))
        doubt = doubt_of(fn, [], {}, kept_in=kept)
        rounds = CanaryRounds(canaries, scorer, count=2, submit=asyncio.run, rates=ErrorRates(), doubt=doubt)
        assert {name for name in read_kept(kept) if "answer" in name} == {"right answer of 7", "wrong answer of 7"}
        return judge_canaries([CanaryRound(step=0, scores=rounds.begin(0))], RewardHealthConfig())

    return begin


def test_a_function_that_was_edited_is_said_to_be_so_beside_the_wrong_score(attempt):
    assert not attempt("one = 1", 1.0).is_broken
    verdict = attempt("ten = 10", 10.0)
    assert verdict.is_broken, "whether that was meant is for a person to say"
    assert "right answer of 7 (9 of 9 times) was scored 10, not 1; reward.fn is not as it was" in verdict.reason
    assert not attempt("one = 1", 1.0).is_broken


def test_so_is_another_function(attempt):
    attempt("one = 1", 1.0)
    assert "reward.fn is not as it was" in attempt("one = 1", 10.0, fn="mine:other").reason


def test_one_that_broke_by_itself_is_only_broken(attempt):
    attempt("one = 1", 1.0)
    assert attempt("one = 1", 10.0).reason == "right answer of 7 (9 of 9 times) was scored 10, not 1"


def test_an_edit_that_scores_as_before_is_nothing_to_tell(attempt):
    attempt("one = 1", 1.0)
    assert attempt("one = 2 - 1", 1.0).reason == "known answers scored as they should be"
