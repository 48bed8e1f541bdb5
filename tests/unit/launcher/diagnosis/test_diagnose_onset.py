"""Onsets are found looking back, whatever the shape of the fall; healthy series have none."""

import random

import numpy as np
import pytest

from launcher.checkpoints.onset import Shape, find_falls
from launcher.checkpoints.segments import partition
from launcher.diagnosis.judging.step_history import falls_of, passes_of
from launcher.diagnosis.reading.log_records import REWARD, Steps
from tests.support.made_runs.rewards import FALLS, HEALTHY
from tests.support.reward_runs import HEALTHY as HEALTHY_ONLINE
from tests.support.reward_runs import Run, falling, learning

EACH = 6


def series(run, steps, seed):
    return np.array([point.mean for point in run.points(steps, seed)])


def drawn(kind, number, kinds):
    return kinds[kind](random.Random(f"test {kind} {number}"))


def failures(rewards):
    """What scripts/diagnose.py calls a failure: a fall that lasts to the end, or did harm."""
    return [fall for fall in find_falls(np.array(rewards)) if not fall.is_over or fall.zeros >= 5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FALLS)
def test_falls_are_found_with_their_onset(kind):
    made = [drawn(kind, number, FALLS) for number in range(EACH)]
    found = [(failures(one.rewards), one.onset) for one in made]
    assert sum(bool(falls) for falls, _ in found) >= EACH - ("200" in kind)
    within = 15 if "200" in kind else 5 if "decay" in kind else 2
    assert all(abs(falls[0].onset - onset) <= within for falls, onset in found if falls)


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_series_have_no_failure(kind):
    assert not any(failures(drawn(kind, number, HEALTHY).rewards) for number in range(EACH))


@pytest.mark.parametrize("name", HEALTHY_ONLINE)
def test_what_the_online_detector_stays_silent_on_is_silent_here(name):
    assert find_falls(series(HEALTHY_ONLINE[name], 400, name)) == []


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda s: learning(s) if s < 100 else 0.0, Shape.ZERO),
        (lambda s: learning(s) if s < 100 else 0.3, Shape.PLATEAU),
        (falling(0.8, 0.1, 100, over=50), Shape.DECAY),
        (lambda s: learning(s) if s < 100 or s % 9 == 0 else 0.0, Shape.SPIKES),
    ],
)
def test_the_shape_is_named(make, shape):
    (fall,) = find_falls(series(Run(make), 260, "shape"))
    assert fall.shape is shape
    assert fall.end is None
    assert fall.before == pytest.approx(0.75, abs=0.1)


def test_a_fall_that_is_over_says_when_it_ended():
    (fall,) = find_falls(series(Run(lambda s: 0.0 if 100 <= s < 130 else learning(s)), 260, 1))
    assert (fall.onset, fall.end, fall.zeros) == (100, 130, 30)


def test_a_reward_of_1e37_hides_nothing_and_is_no_fall():
    rewards = series(Run(learning), 260, 5)
    rewards[[40, 41, 120]] = [-1e37, 4e36, 1e30]
    assert find_falls(rewards) == []
    rewards[200:] = 0
    assert [fall.onset for fall in find_falls(rewards)] == [200]


def test_two_falls_are_two():
    level = lambda s: 0.0 if 100 <= s < 130 or s >= 200 else learning(s)  # noqa: E731
    falls = find_falls(series(Run(level), 260, 1))
    assert [(fall.onset, fall.end) for fall in falls] == [(100, 130), (200, None)]


def test_one_lost_step_is_no_fall_and_five_are():
    def lost(count):
        return find_falls(series(Run(lambda s: 0.0 if 100 <= s < 100 + count else learning(s)), 260, 1))

    assert lost(1) == lost(3) == []
    assert [fall.onset for fall in lost(8)] == [100]


def test_zeros_from_the_first_step_are_named():
    (fall,) = find_falls(np.zeros(40))
    assert (fall.onset, fall.shape) == (0, Shape.NEVER)
    assert find_falls(np.zeros(4)) == []


def test_steps_without_a_reward_count_once_they_stay_away():
    rewards = series(Run(learning), 150, 2)
    rewards[40] = np.nan
    assert find_falls(rewards) == []
    rewards[100:] = np.nan
    (fall,) = find_falls(rewards)
    assert (fall.onset, fall.shape) == (100, Shape.MISSING)


@pytest.mark.parametrize("rewards", [[], [0.5], [0.5] * 7, [float("nan")] * 50])
def test_too_little_to_judge_is_no_fall(rewards):
    assert find_falls(np.array(rewards, dtype=float)) == []


def test_a_fall_that_a_recovery_took_back_is_found_and_said_to_be():
    steps = Steps()
    first = series(Run(lambda s: learning(s) if s < 80 else 0.0), 120, 3)
    again = series(Run(learning), 200, 4)
    for number, reward in [*enumerate(first), *list(enumerate(again))[70:]]:
        steps.append(number, None, {REWARD: reward})
    (found,) = falls_of(steps, passes_of(steps))
    assert (steps.steps[found.rows[found.fall.onset]], found.is_current) == (80, False)


@pytest.mark.slow
def test_a_long_series_takes_no_longer_than_its_length():
    rng = np.random.default_rng(0)
    rewards = np.clip(0.7 + rng.normal(0, 0.04, 60_000), 0, 1)
    rewards[45_000:] = 0
    (fall,) = find_falls(rewards)
    assert fall.onset == 45_000


def test_partition_finds_levels_and_nothing_in_noise():
    rng = np.random.default_rng(1)
    levels = np.repeat([0.2, 0.8, 0.5], 50) + rng.normal(0, 0.02, 150)
    assert partition(levels, 0.02) == [(0, 50), (50, 100), (100, 150)]
    assert partition(rng.normal(0, 1, 500), 1.0) == [(0, 500)]
