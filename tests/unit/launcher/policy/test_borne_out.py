"""P12: what the run's own record and the first batch after a restore show."""

import dataclasses
import math
import random

import pytest

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig, RewardHealthConfig
from launcher.policy import reward_health
from launcher.policy.canary_policy import (
    CanaryRound,
    CanaryScore,
    compare_replayed,
    compare_rescored,
    explains,
    judge_canaries,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.policy.restore import FIRST_WEIGHTS, choose
from launcher.policy.reward_health import (
    Level,
    RewardPoint,
    as_learned,
    has_learned,
    judge_rewards,
    low_since,
    restore_contradicted,
)
from tests.support.reward_runs import HEALTHY, Run, falling, steady

SETTINGS = RewardHealthConfig()
RIGHT = [(1.0, 1.0, 1.0)] * 18 + [(0.0, 0.0, 0.0)] * 6


def point(step, mean):
    return RewardPoint(step=step, mean=mean, low=0.0, high=1.0)


def is_broken(score):
    return judge_canaries([CanaryRound(step=3, scores=(score,))], SETTINGS).is_broken


# ── completions scored again ──


@pytest.mark.parametrize(
    ("now", "broken"),
    [
        ([1.0] * 18 + [0.0] * 6, False),
        ([0.0] * 24, True),
        ([1.0] * 24, True),
        ([1.0, 0.0] * 9 + [0.0] * 6, True),  # broken for half
        ([0.0] + [1.0] * 17 + [0.0] * 6, False),  # one that differs is chance
    ],
)
def test_a_function_that_scores_old_completions_otherwise_is_broken(now, broken):
    assert is_broken(compare_rescored(RIGHT, now)) is broken


def test_a_noisy_function_is_judged_by_its_own_noise():
    rng = random.Random(1)
    earlier = [tuple(float(rng.random() < 0.7) for _ in range(3)) for _ in range(24)]
    for _ in range(50):
        assert not is_broken(compare_rescored(earlier, [float(rng.random() < 0.7) for _ in earlier]))
    assert is_broken(compare_rescored(earlier, [0.0] * 24))


def test_completions_that_are_not_scored_are_no_score_of_0():
    score = compare_rescored(RIGHT, [None] * 12 + [1.0] * 12, "it raised")
    assert (score.got, score.error) == (None, "it raised")
    now_and_then = compare_rescored(RIGHT, [None, *[1.0] * 17, *[0.0] * 6], "it raised")
    assert now_and_then.got is not None
    assert not is_broken(now_and_then)
    assert is_broken(compare_rescored(RIGHT, [1e308] * 24)), "no reading of anything is not as it should be"


# ── prompts answered again ──


@pytest.mark.parametrize(
    ("now", "drop", "excused"), [(0.8, 0.4, True), (0.4, 0.4, False), (0.65, 0.4, False), (0.8, 0.05, False)]
)
def test_old_prompts_that_earn_as_before_excuse_the_weights_where_they_can_tell(now, drop, excused):
    def rewards(rate):
        return [[1.0] * round(8 * rate) + [0.0] * (8 - round(8 * rate))] * 32

    assert explains(compare_replayed(rewards(0.8), rewards(now)), drop) is excused
    assert not explains(None, drop)


# ── low batches ──


def test_a_fall_is_asked_about_at_its_first_batch_and_healthy_batches_seldom_are():
    points = Run(falling(0.8, 0.4, 60)).points(61, 0)
    assert low_since(points[60], points[:60], SETTINGS) == 60
    asked = total = 0
    for name, run in HEALTHY.items():
        points = run.points(300, name)
        asked += sum(low_since(points[n], points[:n], SETTINGS) is not None for n in range(20, 300, 3))
        total += 94
    assert asked / total < 0.02


BY_HAND = dataclasses.replace(SETTINGS, noise_floor=0.0625, fall_min_drop=0.25)
"""The noise of rewards from 0 to 1 that do not vary is 1/16."""


def level(*means):
    return [point(step, mean) for step, mean in enumerate(means)]


@pytest.mark.parametrize(
    ("before", "mean", "since"),
    [
        ([0.5] * 20, 0.3125, None),  # three times the noise
        ([0.5] * 20, 0.3124, 20),
        ([0.1] * 10 + [0.5] * 50, 0.3124, 60),  # the last 50 are compared with
        ([0.5] * 5, 0.0, 5),
        ([0.5] * 4, 0.0, None),
        ([0.5] * 20, float("nan"), None),
        ([0.5] * 20 + [0.25] * 4, 0.5, None),
    ],
)
def test_which_batch_is_asked_about(before, mean, since):
    assert low_since(point(len(before), mean), level(*before), BY_HAND) == since


@pytest.mark.parametrize(
    ("ranges", "usual", "low"),
    [
        ([(0.0, 1.0)] * 18 + [(-0.5, 1.0), (0.0, 1.5)], 0.13, 0.12),
        ([(0.5, 0.5)] * 20, 0.3125, 0.3),  # no range: as one of 1
    ],
)
def test_the_least_noise_is_a_share_of_the_range_from_the_least_reward_to_the_greatest(ranges, usual, low):
    before = [RewardPoint(step=n, mean=0.5, low=least, high=most) for n, (least, most) in enumerate(ranges)]
    assert low_since(RewardPoint(step=20, mean=usual, low=0.5, high=0.5), before, BY_HAND) is None
    assert low_since(RewardPoint(step=20, mean=low, low=0.5, high=0.5), before, BY_HAND) == 20


def test_a_fall_that_would_be_believed_is_asked_about_from_its_onset_on():
    fell = level(*[0.8] * 30, *[0.5] * 2)
    assert low_since(point(32, 0.5), fell, SETTINGS) == 30
    slightly = level(*[0.8] * 60, 0.6)
    small = dataclasses.replace(SETTINGS, noise_floor=0.0625)
    assert low_since(point(61, 0.6), slightly, small) == 61
    assert low_since(point(61, 0.6), slightly, small, restored_step=25) == 60


# ── the first batch after a restore ──


@pytest.mark.parametrize(
    ("mean", "replayed", "contradicted"),
    [
        (0.0, None, True),
        (0.6, None, False),
        (0.5, None, False),  # one batch may be hard
        (0.0, (0.6, 0.0), True),
        (0.0, (0.6, 0.6), False),  # the prompts are harder: old ones are answered as before
        (0.6, (0.8, 0.6), False),  # the record is of later, better weights
    ],
)
def test_the_checkpoint_is_its_own_witness(mean, replayed, contradicted):
    def rewards(rate):
        return [[1.0] * round(10 * rate) + [0.0] * (10 - round(10 * rate))] * 24

    saved = Run(steady(0.6), hard_share=0.0).points(40, 4)
    score = None if replayed is None else compare_replayed(rewards(replayed[0]), rewards(replayed[1]))
    reason = restore_contradicted(point(40, mean), saved, score, SETTINGS)
    assert bool(reason) is contradicted
    assert not contradicted or "what changed is not the weights" in reason
    assert restore_contradicted(point(40, mean), saved[:4], score, SETTINGS) == "", "too few steps are known"


HALF = level(*[0.9] * 30, *[0.5] * 20)
"""As many as a whole baseline, so that the noise is as sure as it gets."""


def again(errors_low):
    return CanaryScore(name="old prompts", expected=0.5, got=0.5 - errors_low / 16, tolerance=0.25)


@pytest.mark.parametrize(
    ("mean", "saved", "replayed", "change", "contradicted"),
    [
        (0.25, HALF, None, {}, True),  # four times the noise, and the least fall
        (0.26, HALF, None, {}, False),
        (0.26, HALF, None, {"fall_min_drop": 0.05}, False),
        (0.25, HALF, None, {"fall_min_drop": 0.26}, False),
        (0.25, HALF[-20:], None, {}, False),
        (0.19, HALF[-20:], None, {}, True),  # of 20 steps the noise may be 1.24 times as large: 4 × 1.24 / 16 below
        (0.2, HALF[-20:], None, {}, False),
        (0.005, HALF[-5:], None, {}, True),  # and of 5 twice
        (0.006, HALF[-5:], None, {}, False),
        (0.25, HALF[-4:], None, {}, False),
        (float("nan"), HALF, None, {}, False),
        (0.25, HALF, again(1.7), {}, True),  # (4 + 1.7) / √2 is above 4
        (0.25, HALF, again(1.6), {}, False),
        (0.0, HALF, again(1.0), {}, True),
        (0.0, HALF, again(0.9), {}, False),
        (0.25, HALF, again(0.0), {}, False),
    ],
)
def test_each_bound_of_what_contradicts_a_restore(mean, saved, replayed, change, contradicted):
    settings = dataclasses.replace(BY_HAND, **change)
    reason = restore_contradicted(point(50, mean), saved, replayed, settings)
    also = "" if replayed is None else f", and old prompts {replayed.got:.3g} in place of 0.5"
    said = f"the weights of step 49 earn {mean:.3g} now, and earned 0.5 when they were saved{also}: what changed is not"
    assert reason == (f"{said} the weights" if contradicted else "")


def test_a_young_run_is_not_contradicted_by_chance(monkeypatch):
    """A run that had truly collapsed ended for a person: of five steps, which happened to be alike, the noise was
    thought to be a third of what it was."""

    def contradicted():
        rng = random.Random(7)
        runs = ([sum(rng.random() < 0.5 for _ in range(8)) / 8 for _ in range(6)] for _ in range(1000))
        return sum(bool(restore_contradicted(point(5, now), level(*before), None, SETTINGS)) for *before, now in runs)

    assert contradicted() <= 1
    monkeypatch.setattr(reward_health, "UNSURE_ONCE", 0.0)
    assert contradicted() > 5


def test_the_least_fall_after_a_restore_is_a_share_of_the_rewards_range():
    saved = [dataclasses.replace(one, high=2.0) for one in HALF]
    assert restore_contradicted(point(50, 0.0), saved, None, BY_HAND)
    assert not restore_contradicted(point(50, 0.0), saved, None, dataclasses.replace(BY_HAND, fall_min_drop=0.26))


def test_how_much_was_learned_is_the_mean_over_the_prompts_and_as_sure_as_their_steps():
    learned = level(*[0.25] * 5, *[0.75] * 45)
    score = dataclasses.replace(again(0.0), steps=(3, 3, 99, 99), tolerance=0.5)
    now = as_learned(score, learned, BY_HAND)
    assert now.expected == 0.5 + (0.5 + 0.5 + 0 + 0) / 4
    assert now.tolerance == pytest.approx(math.hypot(0.5, 4 / 16 * math.sqrt(1 / 20 + 1 / 2)))
    unknown = dataclasses.replace(score, steps=(60,))
    assert as_learned(unknown, learned, BY_HAND) is unknown
    assert as_learned(dataclasses.replace(score, steps=()), learned, BY_HAND).tolerance == 0.5
    young = as_learned(score, learned[:25], BY_HAND)
    assert young.tolerance > now.tolerance, "the noise is known worse"
    few = level(0.25, 0.5, 0.5, 0.5, 0.5)
    one = dataclasses.replace(score, steps=(0,))
    assert as_learned(one, few, BY_HAND).expected == pytest.approx(0.5 + 0.45 - 0.25)
    assert as_learned(one, few[:4], BY_HAND) is one


def test_prompts_of_earlier_steps_should_earn_as_much_more_as_the_run_has_learned():
    learned = [point(step, 0.2 + 0.02 * step) for step in range(21)]
    score = compare_replayed([[1.0] * 2 + [0.0] * 6] * 32, [[1.0] + [0.0] * 7] * 32, [3] * 32)
    now = as_learned(score, learned, SETTINGS)
    assert now.expected == pytest.approx(0.25 + 0.41 - 0.26)
    assert now.tolerance > score.tolerance
    assert restore_contradicted(point(21, 0.25), learned, score, SETTINGS), "0.125 is far below 0.4, not below 0.25"
    slipped = [point(step, 0.6 - 0.02 * step) for step in range(21)]
    assert as_learned(score, slipped, SETTINGS).expected == 0.25, "never less"
    assert as_learned(score, [], SETTINGS) is score
    assert as_learned(None, learned, SETTINGS) is None


# ── an edge is no estimate ──


def saved(step):
    return CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE)


def fell(**more):
    return Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=62, **more)


def test_before_a_sharp_fall_the_newest_is_chosen_and_a_certified_one_if_it_comes_back():
    shelf = [dataclasses.replace(saved(39), status=CheckpointStatus.GOOD), saved(49), saved(60), saved(61)]
    assert choose(shelf, fell(), [], RestoreConfig()).global_step == 39
    assert choose(shelf, fell(is_sharp=True), [], RestoreConfig()).global_step == 60
    before = RepairAttempt(
        at=0.0, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=62, restored_step=60
    )
    assert choose(shelf, fell(is_sharp=True), [before], RestoreConfig()).global_step == 39


def test_an_edge_is_sharp_and_a_slope_is_not():
    edges = [judge_rewards(Run(falling(0.8, 0.1, 60)).points(63, seed), SETTINGS) for seed in range(8)]
    slopes = [judge_rewards(Run(falling(0.8, 0.0, 60, over=40)).points(80, seed), SETTINGS) for seed in range(8)]
    assert all(one.level is Level.BREAK and one.is_sharp and one.onset_step == 60 for one in edges)
    assert not any(one.is_sharp for one in slopes)


# ── nothing is begun anew ──


def test_a_run_that_had_learned_is_never_begun_anew():
    assert choose([saved(61)], fell(), [], RestoreConfig()).global_step == FIRST_WEIGHTS
    halts = choose([saved(61)], fell(had_learned=True), [], RestoreConfig())
    assert halts.global_step is None
    assert "not thrown away" in halts.reason


def test_what_was_learned_is_seen_in_the_rewards():
    rose = [point(step, 0.3 + 0.01 * step) for step in range(50)]
    flat = [point(step, 0.5 + 0.01 * (-1) ** step) for step in range(50)]
    assert has_learned(rose, 45, SETTINGS)
    assert not has_learned(flat, 45, SETTINGS)
    assert not has_learned(rose, 4, SETTINGS)
    assert has_learned(flat[20:], None, SETTINGS), "how it began is not known: it ran long"


def test_the_bounds_of_what_was_learned():
    rose = [point(step, 0.25 if step < 5 else 0.5) for step in range(10)]
    slightly = dataclasses.replace(SETTINGS, fall_min_drop=0.24)
    assert has_learned(rose, None, slightly)
    assert has_learned(rose, 10, slightly)
    assert not has_learned(rose, None, BY_HAND), "as much as the least fall is nothing"
    assert not has_learned(rose, 9, dataclasses.replace(SETTINGS, fall_min_drop=0.1)), "nine steps say nothing"
    longer = [point(step, 0.25 if step < 10 else 0.5) for step in range(15)]
    assert has_learned(longer, None, slightly)
    wide = [dataclasses.replace(one, high=2.0) for one in longer]
    assert not has_learned(wide, None, slightly)
    assert has_learned(wide, None, SETTINGS)
    flat = [point(step, 0.5) for step in range(30)]
    assert has_learned(flat[5:15], None, BY_HAND)
    assert not has_learned(flat[5:14], None, BY_HAND)
    assert not has_learned(flat[4:], None, BY_HAND)
