"""A broken reward function is named in one round; a slow one is not called broken."""

import math

import pytest

from launcher.config.supervision import RewardHealthConfig
from launcher.policy import canary_policy
from launcher.policy.canary_policy import CanaryRound, CanaryScore, judge_canaries, until_next_round_s

SETTINGS = RewardHealthConfig()
RIGHT, WRONG = 1.0, 0.0


def scored(step, right=RIGHT, wrong=WRONG, error=""):
    """One round: an item whose answer is right, and one whose answer is wrong."""
    return CanaryRound(
        step=step,
        scores=[
            CanaryScore(name="right", expected=RIGHT, got=right, error=error),
            CanaryScore(name="wrong", expected=WRONG, got=wrong),
        ],
    )


def sound(*steps):
    return [scored(step) for step in steps]


@pytest.mark.parametrize(
    ("rounds", "onset", "reason"),
    [
        ([*sound(1, 2), scored(3, right=0.0)], 3, "right was scored 0, not 1"),  # S1: always 0
        ([scored(3, wrong=1.0)], 3, "wrong was scored 1, not 0"),  # S3: always 1
        ([scored(3, right=math.nan)], 3, "right was scored nan, not 1"),
        ([scored(3, right=0.0), *sound(4, 5), scored(6, right=0.0)], 3, "right was scored 0, not 1"),  # S2: at times
        ([scored(3, right=0.0), *sound(3, 3, 3, 3)], 3, "right was scored 0, not 1"),  # not cleared yet
        (
            [*sound(1), scored(2, right=None, error="TypeError"), scored(3, right=None, error="TypeError")],
            2,
            "2 times in a row: right was not scored (TypeError)",  # S3: raises, or never returns
        ),
    ],
)
def test_a_broken_reward_function_is_named_with_its_first_step(rounds, onset, reason):
    verdict = judge_canaries(rounds, SETTINGS)
    assert verdict.is_broken
    assert (verdict.onset_step, verdict.reason) == (onset, reason)


@pytest.mark.parametrize(
    "rounds",
    [
        sound(1, 2, 3),
        [scored(1, right=1.0 - 1e-9)],
        [*sound(1), scored(2, right=None)],  # X: one stall of the reward function
        [scored(1, right=None), *sound(2), scored(3, right=None)],
        [scored(1, right=0.0), *sound(2, 3, 4, 5, 6)],  # mended, and proven so
    ],
)
def test_a_sound_one_is_believed(rounds):
    verdict = judge_canaries(rounds, SETTINGS)
    assert not verdict.is_broken
    assert verdict.onset_step is None


@pytest.mark.parametrize("rounds", [[], [CanaryRound(step=1, scores=[])]])
def test_without_known_answers_nothing_is_accused(rounds):
    assert not judge_canaries(rounds, SETTINGS).is_broken


def test_a_silent_round_clears_nobody():
    rounds = [scored(1, right=0.0), *sound(2, 3), scored(4, right=None), *sound(5, 6)]
    assert judge_canaries(rounds, SETTINGS).is_broken


def test_without_the_comparison_a_broken_one_would_be_believed(monkeypatch):
    monkeypatch.setattr(canary_policy, "_is_wrong", lambda score, settings: False)
    assert not judge_canaries([scored(3, right=0.0)], SETTINGS).is_broken


def test_a_round_is_sound_where_every_known_answer_was_scored_as_it_should_be():
    off = SETTINGS.canary_tolerance
    assert canary_policy.is_sound(scored(1), SETTINGS)
    assert canary_policy.is_sound(scored(1, wrong=off), SETTINGS)
    for broken in (scored(1, right=0.0), scored(1, right=None), scored(1, wrong=2 * off), scored(1, right=math.nan)):
        assert not canary_policy.is_sound(broken, SETTINGS)


def test_the_newest_wrong_score_is_told_and_how_many_more_there_are():
    verdict = judge_canaries([scored(3, right=0.5), *sound(4), scored(5, right=0.25, wrong=1.0)], SETTINGS)
    assert (verdict.is_broken, verdict.onset_step) == (True, 3)
    assert verdict.reason == "right was scored 0.25, not 1, and 1 more like it"
    silent = judge_canaries([scored(n, right=None, wrong=None) for n in (3, 4)], SETTINGS)
    assert (silent.is_broken, silent.onset_step) == (True, 3)
    assert silent.reason == "2 times in a row: right was not scored, and 1 more like it"


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (
            canary_policy.compare_rescored([[1.0]] * 3, [None] * 3, "late"),
            "3 completions of healthy steps were not scored",
        ),
        (
            canary_policy.compare_rescored([[1.0]], [None], "late"),
            "1 completion of healthy steps was not scored (late)",
        ),
        (canary_policy.compare_rescored([[1.0, 1e308]], [-1e308]), "1 completion of healthy steps was scored nan, not"),
        (
            CanaryScore(name="a", expected=0.0, got=math.nan, error="b was scored 0 (seen before)"),
            "b was scored 0 (seen",
        ),
    ],
)
def test_one_is_and_several_are_and_what_a_predecessor_saw_is_told_as_it_was(score, said):
    rounds = [canary_policy.CanaryRound(step=1, scores=(score,))] * canary_policy.SILENT_ROUNDS
    assert said in judge_canaries(rounds, SETTINGS).reason


def test_only_so_many_sound_rounds_in_a_row_clear_it_and_a_wrong_one_begins_the_count_anew():
    few, enough = SETTINGS.canary_clear_rounds - 1, SETTINGS.canary_clear_rounds
    wrong = scored(1, right=0.0)
    assert judge_canaries([wrong, *sound(*[2] * few)], SETTINGS).is_broken
    assert not judge_canaries([wrong, *sound(*[2] * enough)], SETTINGS).is_broken
    between = [wrong, *sound(*[2] * few), scored(3, right=0.0), *sound(*[4] * few)]
    assert judge_canaries(between, SETTINGS).onset_step == 1, "neither row was long enough"
    unscored = [wrong, *sound(*[2] * few), scored(3, right=None)]
    assert judge_canaries(unscored, SETTINGS).is_broken, "one that is missing clears nothing"


def test_a_broken_reward_function_is_asked_soon_and_then_seldom():
    waited, rounds = 0.0, []
    while waited < 600:
        waited += until_next_round_s(waited)
        rounds.append(waited)
    assert sum(at < 4 for at in rounds) >= 8
    assert sum(at > 60 for at in rounds) <= 56, "at most one in ten seconds"
    assert len(rounds) <= 97


def test_without_known_answers_a_step_that_fails_again_is_tried_after_longer_and_longer_pauses():
    unknown, tries, tried_at, now = CanaryRound(step=3, scores=[]), [], 0.0, 0.0
    while now < SETTINGS.verifier_patience_s:
        if canary_policy.may_be_tried(unknown, SETTINGS, paused_s=now - tried_at, failing_s=tried_at):
            tries.append(tried_at := now)
        now += 1.0
    assert 5 < len(tries) <= 12
    assert tries[0] == 0.0, "once it may have been chance"
    assert canary_policy.may_be_tried(scored(3), SETTINGS, paused_s=0.0, failing_s=500.0)
    assert not canary_policy.may_be_tried(scored(3, right=0.0), SETTINGS, paused_s=500.0, failing_s=0.0)
