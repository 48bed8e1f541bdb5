"""The test for a fall, by hand; what it finds in made-up runs, test_reward_health.py shows."""

import dataclasses
import math
import random
from statistics import median

import pytest

from launcher.config.supervision import RewardHealthConfig
from launcher.policy.change_point import estimate_noise, find_fall
from tests.support.made_runs.rewards import FALLS

BY_HAND = RewardHealthConfig(
    window_steps=3, baseline_steps=4, warmup_steps=2, noise_floor=0.125, fall_min_drop=0.25, outlier_clip=16.0
)
"""The noise is 0.5 where nothing else is said."""
FELL = [2.5, 2.5, *[2.0] * 4, 0.0, 0.0]


@pytest.mark.parametrize(
    ("means", "change", "onset", "before", "after", "score"),
    [
        (FELL, {}, 6, 2.0, 0.0, 4 * math.sqrt(4 / 3)),  # not the first two: the baseline has four steps
        (FELL, {"fall_min_drop": 0.5}, 6, 2.0, 0.0, 4 * math.sqrt(4 / 3)),
        ([*[2.0] * 7, 0.0], {}, 7, 2.0, 0.0, 4 * math.sqrt(4 / 5)),
        ([*[2.0] * 5, *[0.0] * 4], {}, 5, 1.5, 0.0, 3 * math.sqrt(12 / 7)),  # it began before the window
        ([*[2.0] * 4, 0.0, 0.0], {"baseline_steps": 2, "fall_threshold": 3.99}, 4, 2.0, 0.0, 4.0),
        ([*[2.0] * 8, -8.0], {"outlier_clip": 4.0}, 8, 2.0, -8.0, 4 * math.sqrt(4 / 5)),
        ([*[2.0] * 8, 1.9, 1.9, 1.9, 0.0, 0.0], {"baseline_steps": 8}, 11, 1.9625, 0.0, 3.925 * math.sqrt(8 / 5)),
        ([*[2.0] * 8, 1.5, 1.5, 1.5, 0.0, 0.0], {"baseline_steps": 8}, 11, 1.8125, 0.0, 3.625 * math.sqrt(8 / 5)),
        ([2.75, *[1.75] * 3, 0.0, 0.0], {"window_steps": 2}, 4, 2.0, 0.0, 4 * math.sqrt(4 / 3)),
        ([*[1.0] * 5, 2.0, 0.0, 0.0], {"window_steps": 2, "baseline_steps": 1}, 6, 2.0, 0.0, 4 * math.sqrt(2 / 3)),
        ([3.0, *[1.0] * 3, 0.0, 0.0], {"window_steps": 2}, 3, 1.5, 0.0, 6 / math.sqrt(3 * math.pi) / 0.6),
    ],
)
def test_a_fall_by_hand(means, change, onset, before, after, score):
    settings = dataclasses.replace(BY_HAND, **{"fall_threshold": 1.2} | change)
    fall = find_fall(means, settings, reward_range=4.0, threshold=settings.fall_threshold)
    noise = max(0.5, estimate_noise(means))
    assert (fall.onset, fall.before, fall.after) == (onset, pytest.approx(before), pytest.approx(after))
    assert (fall.noise, fall.score) == (pytest.approx(noise), pytest.approx(score))


@pytest.mark.parametrize(
    ("means", "change"),
    [
        (FELL, {"fall_min_drop": 0.51}),
        ([*[2.0] * 4, 0.0, 0.0], {"baseline_steps": 2, "fall_threshold": 4.0}),  # the threshold itself is none
        ([*[2.0] * 4, -8.0, -8.0], {"baseline_steps": 2, "outlier_clip": 4.0, "fall_threshold": 4.0}),
        ([*[2.0] * 4, 0.0, 0.0], {"warmup_steps": 6}),
        ([0.5], {}),
        ([], {}),
        ([*[0.0] * 4, 2.0, 2.0], {}),  # a rise
    ],
)
def test_no_fall_by_hand(means, change):
    settings = dataclasses.replace(BY_HAND, **{"fall_threshold": 1.2} | change)
    assert find_fall(means, settings, reward_range=4.0, threshold=settings.fall_threshold) is None


def test_the_noise_by_hand():
    assert estimate_noise([0.5], 0.25) == estimate_noise([], 0.25) == 0.25
    assert estimate_noise([1.0, 3.0], 0.25) == pytest.approx(math.sqrt(math.pi))
    assert estimate_noise([1.0, 3.0, 3.0, 4.0]) == pytest.approx(math.sqrt(math.pi) / 2)
    young = dataclasses.replace(BY_HAND, baseline_steps=9, noise_floor=0.25)
    fall = find_fall([2.0, 2.0, 2.0, 0.0, 0.0], young, reward_range=4.0, threshold=0.5)
    assert fall.noise == pytest.approx(1 + 5 * (math.sqrt(0.83 / 4) - math.sqrt(0.83 / 8)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FALLS)
def test_the_alarm_is_dated_as_well_as_what_came_before_it_allows(kind):
    """A slow decline was dated to its middle: 9 steps late in the median, where it took 40 to 200."""
    settings = RewardHealthConfig()
    errors = []
    for number in range(20):
        made = FALLS[kind](random.Random(f"{kind} {number}"))
        errors += [fall - made.onset for fall in first_alarm(made.rewards, settings)]
    assert len(errors) >= 18
    assert abs(median(errors)) <= (4 if "decay" in kind else 0)
    assert sum(abs(error) <= (30 if "decay" in kind else 4) for error in errors) >= 0.9 * len(errors)


def first_alarm(rewards, settings):
    """The step at which the fall is said to have begun that stops the run; none where nothing does."""
    for stop in range(1, len(rewards) + 1):
        begin = max(0, stop - settings.window_steps - settings.baseline_steps)
        fall = find_fall(rewards[begin:stop], settings, reward_range=1.0, threshold=settings.fall_threshold)
        if fall is not None:
            return [begin + fall.onset]
    return []
