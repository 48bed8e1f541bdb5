"""The arithmetic of scores that are noisy: what is chance, what is low, and what a drop of the rewards can't be."""

import math

import pytest

from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import (
    CanaryRound,
    CanaryScore,
    compare_replayed,
    compare_rescored,
    explains,
    is_more_than_noise,
    judge_canaries,
    may_be_tried,
)

SETTINGS = RewardHealthConfig()


def score(got, *, expected=1.0, tolerance=0.0):
    return CanaryScore(name="a", expected=expected, got=got, tolerance=tolerance)


@pytest.mark.parametrize(
    ("wrong", "scored", "rate", "is_more"),
    [
        (14, 14, 0.5, True),  # once in 16,384 times
        (13, 13, 0.5, False),  # once in 8,192
        (5, 5, 0.1, True),
        (4, 5, 0.1, False),  # that many, or all of them
        (5, 6, 0.1, True),
        (5, 7, 0.1, False),
        (8, 16, 0.1, True),
        (7, 16, 0.1, False),
        (2, 2, 0.01, False),  # just once in ten thousand
        (1, 1, 0.00005, True),
        (1, 5, 0.0, True),
        (0, 5, 0.0, False),
        (1, 5, 0.5, False),
        (3, 5, 1.0, False),
        (12, 1030, 0.01, False),  # there are more ways than any float holds
        (40, 1030, 0.01, True),
        (10_600, 1_000_000, 0.01, True),
        (10_000, 1_000_000, 0.01, False),
    ],
)
def test_so_many_wrong_ones_are_more_than_noise(wrong, scored, rate, is_more):
    assert is_more_than_noise(wrong, scored, rate) is is_more


@pytest.mark.parametrize(
    ("got", "tolerance", "is_low", "errors"),
    [
        (0.5, 0.25, True, 8.0),
        (0.75, 0.25, False, 4.0),
        (1.125, 0.25, False, -2.0),
        (0.5, 0.0, True, 0.0),
        (None, 0.25, False, 0.0),
    ],
)
def test_a_score_is_low_by_so_many_standard_errors(got, tolerance, is_low, errors):
    one = score(got, tolerance=tolerance)
    assert (one.is_low, one.errors_low) == (is_low, errors)


def test_a_round_without_scores_hides_no_other():
    rounds = [CanaryRound(step=1, scores=[]), CanaryRound(step=2, scores=[score(0.0)])]
    assert judge_canaries(rounds, SETTINGS).onset_step == 2


def test_one_known_answer_is_enough_to_try_a_step_again():
    assert may_be_tried(CanaryRound(step=1, scores=[score(1.0)]), SETTINGS, paused_s=0.0, failing_s=9.0)


@pytest.mark.parametrize(
    ("earlier", "now", "tolerance"),
    [
        ([[0.0], [1.0]], [[0.0], [1.0]], 4 * math.sqrt(0.01 * 4) / 2),  # a tenth of the range
        ([[0.0], [2.0]], [[0.0], [2.0]], 4 * math.sqrt(0.04 * 4) / 2),
        ([[-1.0], [1.0]], [[-1.0], [1.0]], 4 * math.sqrt(0.04 * 4) / 2),
        ([[1.0]], [[1.0]], 4 * math.sqrt(0.01 * 2)),  # as of a range of 1, where all are alike
        ([[0.0, 1.0]], [[0.0, 1.0]], 4 * math.sqrt(0.5)),
    ],
)
def test_the_tolerance_is_four_standard_errors_of_the_difference_of_the_means(earlier, now, tolerance):
    found = compare_replayed(earlier, now, steps=[3, 5])
    assert found.tolerance == pytest.approx(tolerance)
    assert (found.steps, found.stands_for) == ((3, 5), len(earlier))


def test_answers_are_compared_with_as_many():
    with pytest.raises(ValueError, match="zip"):
        compare_rescored([[1.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match="zip"):
        compare_replayed([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize(
    ("replayed", "drop", "does"),
    [
        (score(0.75, tolerance=0.5), 1.25, True),
        (score(0.75, tolerance=0.5), 1.0, False),  # just half of it
        (None, 1.25, False),
        (score(None, tolerance=0.5), 1.25, False),
        (score(0.75, tolerance=0.5), None, False),
    ],
)
def test_prompts_that_earn_what_they_earned_leave_less_than_half_of_a_drop_unexplained(replayed, drop, does):
    assert explains(replayed, drop) is does
