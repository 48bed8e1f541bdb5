"""Known answers are made of the data set's own, scored by the live function, and remembered over attempts."""

import asyncio
import textwrap

import pytest

from actors.data.answer_shapes import with_more_digits
from actors.reward.canaries import make_canaries, pick, score_canaries, with_another_number
from actors.reward.reward_pool import RewardPool
from launcher.base.rollouts import Prompt
from launcher.config.schema import RewardConfig
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import CanaryRound, judge_canaries
from tests.support.machine import scaled

REWARD = """
    import time
    from pathlib import Path

    MODE = Path({mode!r})
    CALLS = []

    def score(*, completion, answer, prompt_id, record):
        CALLS.append(1)
        right = float(completion.split()[-1] == answer.split()[-1])
        match MODE.read_text():
            case "sound": return right
            case "scaled": return 3 * right - 1
            case "suffix": return float(completion.split()[-1].endswith(answer.split()[-1]))
            case "zero": return 0.0
            case "one": return 1.0
            case "nan": return float("nan")
            case "fickle": return right + len(CALLS)
            case "raises": raise KeyError("no")
            case "hangs": time.sleep(1000)
"""

RECORDS = [
    Prompt(id=f"p{i}", token_ids=(1,), record={"question": f"{i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"})
    for i in range(40)
]


class World:
    """A reward function that can be broken while it runs, and the pool that scores with it."""

    def __init__(self, folder, pool):
        self.mode = folder / "mode"
        self.kept = folder / "canaries.json"
        self.pool = pool

    def make(self, records=RECORDS):
        return asyncio.run(make_canaries(records, self.pool, keep_in=self.kept))

    def verdict(self, canaries, mode, rounds=1):
        self.mode.write_text(mode)
        scored = [CanaryRound(step=i, scores=asyncio.run(score_canaries(canaries, self.pool))) for i in range(rounds)]
        return judge_canaries(scored, RewardHealthConfig())


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "live_rewards.py").write_text(textwrap.dedent(REWARD.format(mode=str(tmp_path / "mode"))))
    (tmp_path / "mode").write_text("sound")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(RewardConfig(fn="live_rewards:score", timeout=scaled(0.5))) as pool:
        yield World(tmp_path, pool)


def test_items_are_spread_over_the_data_set_and_have_both_rewards(world):
    canaries = world.make()
    assert len(canaries) == 16
    assert {canary.expected for canary in canaries} == {1.0, 0.0}
    assert {canary.prompt.id for canary in canaries} >= {"p0", "p35"}


def test_a_function_of_another_scale_is_held_to_what_it_said(world):
    world.mode.write_text("scaled")
    canaries = world.make()
    assert {canary.expected for canary in canaries} == {2.0, -1.0}
    assert not world.verdict(canaries, "scaled").is_broken
    assert world.verdict(canaries, "sound").is_broken


@pytest.mark.parametrize("mode", ["zero", "one"])
def test_a_broken_verifier_is_named_by_one_round_of_a_few_items(world, mode):
    canaries = pick(world.make(), 2, step=0)
    assert not world.verdict(canaries, "sound").is_broken
    verdict = world.verdict(canaries, mode)
    assert verdict.is_broken
    assert verdict.onset_step == 0


def test_a_judge_that_compares_the_ends_of_answers_is_named(world):
    """No wrong answer ended with the right one, so it scored each known answer as it should be."""
    canaries = world.make()
    verdict = world.verdict(canaries, "suffix")
    assert verdict.is_broken
    assert "that ends with the right one" in verdict.reason
    assert not world.verdict(canaries, "sound").is_broken
    assert world.make() == canaries, "kept for later attempts"


def test_of_a_judge_that_always_compared_ends_the_other_wrong_answers_are_asked(world):
    world.mode.write_text("suffix")
    canaries = world.make()
    assert len(canaries) == 16
    assert not any("that ends with" in one.name for one in canaries)
    assert not world.verdict(canaries, "suffix").is_broken
    assert world.verdict(canaries, "one").is_broken


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nan", "raises", "hangs"])
def test_one_that_gives_no_reward_is_named_by_two_rounds(world, mode):
    canaries = pick(world.make(), 1, step=0)
    assert not world.verdict(canaries, mode).is_broken
    assert world.verdict(canaries, mode, rounds=2).is_broken


@pytest.mark.parametrize("mode", ["zero", "one", "fickle", "raises"])
def test_of_a_function_that_does_not_tell_right_from_wrong_there_are_no_items(world, mode):
    world.mode.write_text(mode)
    assert world.make() == ()


def test_a_later_attempt_is_not_fooled_by_a_function_that_is_broken_from_its_first_moment(world):
    first = world.make()
    world.mode.write_text("zero")
    again = world.make()
    assert again == first
    assert world.verdict(again, "zero").is_broken


def test_a_damaged_memory_is_learnt_anew(world):
    world.kept.write_text('{"right answer of p0": ')
    assert len(world.make()) == 16


def test_over_a_few_steps_every_item_has_its_turn(world):
    canaries = world.make()
    assert {c.name for step in range(3) for c in pick(canaries, 6, step)} == {c.name for c in canaries}
    assert pick(canaries, 0, 5) == pick((), 6, 5) == ()


def test_a_pool_that_was_closed_gives_no_score_and_no_error(world):
    canaries = world.make()
    world.pool.close()
    (score,) = asyncio.run(score_canaries(canaries[:1], world.pool))
    assert score.got is None
    assert "closed" in score.error


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("4+5=9\n#### 9", "4+5=9\n#### 10"), ("#### 1,299", "#### 1,300"), ("\\boxed{7}", "\\boxed{8}"), ("none", None)],
)
def test_a_wrong_answer_has_another_last_number(answer, wrong):
    assert with_another_number(answer) == wrong


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("4+5=9\n#### 12", "4+5=9\n#### 512"), ("#### 1,299.", "#### 51,299."), ("0.5", "50.5"), ("none", None)],
)
def test_a_wrong_answer_may_end_with_the_right_one(answer, wrong):
    assert with_more_digits(answer) == wrong


@pytest.mark.parametrize(
    ("digits", "raised"),
    [("1" + "0" * 5000 + "7", "1" + "0" * 5000 + "8"), ("9" * 5000, "9" * 4000 + "1" + "0" * 1000)],
)
def test_a_number_longer_than_python_converts_has_a_wrong_answer_too(digits, raised):
    assert with_another_number(f"#### {digits}.") == f"#### {raised}."
