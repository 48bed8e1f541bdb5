"""A fall of the rewards is found in a few steps with its onset; healthy runs raise next to no alarm."""

import dataclasses
import math
from dataclasses import replace
from statistics import median

import pytest

from launcher.base.messages import Cause
from launcher.config.supervision import RestoreConfig, RewardHealthConfig
from launcher.policy import change_point, reward_health
from launcher.policy.canary_policy import CanaryRound, CanaryScore, CanaryVerdict
from launcher.policy.reward_health import (
    Level,
    RewardPoint,
    RewardVerdict,
    ServerFault,
    distance_drifted,
    find_cause,
    judge_rewards,
    judge_zeros,
    never_rewarded,
)
from tests.support.reward_runs import HARDER_BY, HEALTHY, Run, falling, steady

SETTINGS = RewardHealthConfig()
ONSET = 60
TRIALS = 12


def with_settings(**changes):
    return dataclasses.replace(SETTINGS, **changes)


def alarms(points, settings=SETTINGS, **kwargs):
    """The steps at which training would have been stopped, each time beginning anew."""
    found, begin = [], 0
    for end in range(1, len(points) + 1):
        if judge_rewards(points[begin:end], settings, **kwargs).level is Level.BREAK:
            found.append(end - 1)
            begin = end
    return found


def fall_found(run, seed, settings=SETTINGS, *, onset=ONSET, **kwargs):
    """(steps until the alarm, estimated minus true onset) of a fall at `onset`; None: not found in 100 steps."""
    points = run.points(onset + 100, seed)
    for end in range(onset + 1, len(points) + 1):
        verdict = judge_rewards(points[:end], settings, **kwargs)
        if verdict.level is Level.BREAK:
            return end - onset, verdict.onset_step - onset
    return None


# ── falls ──


@pytest.mark.parametrize(
    ("rollouts", "to", "steps"),
    [(128, 0.0, 2), (128, 0.1, 3), (128, 0.2, 4), (128, 0.3, 9), (32, 0.0, 3), (32, 0.1, 5), (32, 0.2, 7)],
)
def test_a_fall_is_found_as_fast_as_the_best_cusum_and_its_onset_with_it(rollouts, to, steps):
    run = Run(falling(0.4, to, ONSET), rollouts=rollouts, prompts_sd=0.0)
    found = [fall_found(run, seed) for seed in range(TRIALS)]
    assert None not in found
    assert median(delay for delay, _ in found) <= steps
    assert all(-10 <= error <= 2 for _, error in found)


@pytest.mark.parametrize("over", [10, 30])
def test_a_slope_is_dated_to_where_it_began(over):
    """As S4: the policy takes some steps to fall apart; the checkpoint from within must not pass for good."""
    run = Run(falling(0.8, 0.0, ONSET, over=over))
    found = [fall_found(run, seed) for seed in range(TRIALS)]
    assert None not in found
    assert median(error for _, error in found) <= RestoreConfig().onset_margin_steps
    assert max(delay for delay, _ in found) <= over


def test_after_a_restore_a_fall_is_found_sooner():
    run = Run(falling(0.6, 0.45, ONSET))
    usual = [fall_found(run, seed)[0] for seed in range(TRIALS)]
    on_probation = [fall_found(run, seed, restored_step=ONSET - 5)[0] for seed in range(TRIALS)]
    assert all(sooner <= later for sooner, later in zip(on_probation, usual, strict=True))
    assert sum(on_probation) < sum(usual)


def test_a_function_that_was_never_seen_to_reward_anything():
    """Neither a completion nor a known answer. Where the first steps are not known, it isn't known either."""
    zeros = [RewardPoint(step=step, mean=0.0, low=0.0, high=0.0) for step in range(5)]
    right = CanaryRound(step=0, scores=[CanaryScore(name="right", expected=1.0, got=1.0)])
    wrong = CanaryRound(step=0, scores=[CanaryScore(name="right", expected=1.0, got=0.0)])
    late = CanaryRound(step=0, scores=[CanaryScore(name="right", expected=1.0, got=None)])
    assert never_rewarded(zeros, [])
    assert never_rewarded(zeros, [wrong, late])
    assert not never_rewarded(zeros, [late, right])
    assert not never_rewarded(zeros[1:], [])
    assert not never_rewarded([], [])
    assert not never_rewarded([replace(zeros[0], mean=0.1, high=1.0), *zeros[1:]], [])


def test_without_the_detector_a_fall_is_missed():
    run = Run(falling(0.4, 0.1, ONSET))
    assert fall_found(run, 0) is not None
    assert fall_found(run, 0, with_settings(fall_threshold=None)) is None


# ── healthy runs ──


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.long)])
def test_at_most_one_false_alarm_in_a_thousand_healthy_steps(seeds):
    counts = {
        name: sum(len(alarms(run.points(1000, f"{name} {seed}"))) for seed in range(seeds))
        for name, run in HEALTHY.items()
    }
    per_thousand = sum(counts.values()) / (seeds * len(HEALTHY))
    print(f"{per_thousand:.3f} false alarms in 1,000 healthy steps, of {seeds * len(HEALTHY)},000: {counts}")
    assert max(counts.values()) <= seeds
    assert per_thousand <= 0.1  # over all kinds, one in ten thousand


def test_probation_costs_few_false_alarms():
    run = Run(steady(0.6))
    for seed in range(8):
        points = run.points(100, seed)
        quiet = points[:50]
        assert not alarms(quiet)
        ends = range(51, 101)
        assert all(judge_rewards(points[:end], SETTINGS, restored_step=49).level is Level.SOUND for end in ends)


def lowered(points, steps, by):
    return [dataclasses.replace(p, mean=max(p.mean - by, 0.0)) if p.step in steps else p for p in points]


@pytest.mark.parametrize("rate", [0.4, 0.8])
@pytest.mark.parametrize("steps", [{70}, {70, 75, 80}, {70, 71}])
def test_a_harder_batch_is_no_fall(rate, steps):
    points = Run(steady(rate), hard_share=0.0).points(150, rate)
    assert alarms(lowered(points, steps, HARDER_BY)) == []


def test_one_batch_without_any_reward_is_no_fall_but_would_be_if_outliers_counted_whole():
    points = Run(steady(0.6), hard_share=0.0).points(150, 3)
    assert alarms(lowered(points, {80}, 1.0)) == []
    assert alarms(lowered(points, {80}, 1.0), with_settings(outlier_clip=1e6))


def test_a_plateau_without_any_noise_is_credited_with_some():
    points = [RewardPoint(step=step, mean=0.96 if 80 <= step < 90 else 0.99, low=0.0, high=1.0) for step in range(100)]
    assert alarms(points) == []
    assert alarms(points, with_settings(noise_floor=1e-3, fall_min_drop=0.0))


def test_before_the_warm_up_nothing_is_compared():
    points = [RewardPoint(step=step, mean=0.9 if step < 8 else 0.3, low=0.0, high=1.0) for step in range(14)]
    assert alarms(points) == []
    assert alarms(points, with_settings(warmup_steps=5))


def test_a_young_run_whose_noise_is_hardly_known_is_not_accused_for_it(monkeypatch):
    """Seen in CI: 26 steps of 8 answers, restored once; 0.6 to 0.28 for four steps, 4.1 standard errors, ended it."""
    young = with_settings(warmup_steps=5)
    runs = [Run(steady(0.7), rollouts=8, prompts_sd=0.2).points(30, seed) for seed in range(100)]

    def accused():
        return sum(bool(alarms(points, young, restored_step=4)) for points in runs)

    assert accused() == 0
    monkeypatch.setattr(change_point, "UNSURE", 0.0)
    assert accused() > 4


# ── zeros ──


def zeros(n, *, after=0):
    ones = [RewardPoint(step=step, mean=0.5, low=0.0, high=1.0) for step in range(after)]
    return ones + [RewardPoint(step=after + i, mean=0.0, low=0.0, high=0.0) for i in range(n)]


@pytest.mark.parametrize(
    ("streak", "change", "level"),
    [
        (4, {}, Level.SOUND),
        (5, {}, Level.ALERT),
        (9, {}, Level.ALERT),
        (10, {}, Level.BREAK),
        (500, {"zero_breaker_steps": None}, Level.ALERT),
        (500, {"zero_breaker_steps": None, "zero_alert_steps": None}, Level.SOUND),
        (3, {"zero_alert_steps": 2, "zero_breaker_steps": 3}, Level.BREAK),
    ],
)
def test_a_streak_of_zeros(streak, change, level):
    settings = with_settings(fall_threshold=None, **change)
    verdict = judge_rewards(zeros(streak, after=3), settings)
    assert verdict.level is level
    assert verdict.onset_step == (None if level is Level.SOUND else 3)


def test_on_probation_the_streak_is_shorter():
    settings = with_settings(fall_threshold=None)
    for streak, level in ((3, Level.SOUND), (4, Level.ALERT), (8, Level.BREAK)):
        assert judge_rewards(zeros(streak, after=3), settings, restored_step=2).level is level
    assert judge_rewards(zeros(9, after=60), settings, restored_step=2).level is Level.ALERT


def test_where_steps_without_a_reward_are_usual_a_longer_streak_is_needed_and_still_stops_it():
    """A hard task: every other batch without any reward. Ten in a row come once in a thousand steps."""
    settings = with_settings(fall_threshold=None)
    usual = [dataclasses.replace(p, mean=0.01 * (p.step % 2), high=float(p.step % 2)) for p in zeros(0, after=50)]
    streak = [dataclasses.replace(p, step=50 + p.step) for p in zeros(30)]
    verdicts = [judge_rewards([*usual, *streak[:length]], settings) for length in range(1, 31)]
    levels = [verdict.level for verdict in verdicts]
    assert levels == [Level.SOUND] * 9 + [Level.ALERT] * 10 + [Level.BREAK] * 11
    assert verdicts[-1].reason == "every reward was 0 for 30 steps in a row, as in 25 of the 50 steps before"
    assert (
        judge_rewards([*usual, *streak], with_settings(fall_threshold=None, zero_breaker_steps=None)).level
        is Level.ALERT
    )


def test_one_reward_ends_the_streak_and_small_ones_are_none():
    settings = with_settings(fall_threshold=None)
    point = RewardPoint(step=99, mean=0.01, low=0.0, high=1.0)
    assert judge_rewards([*zeros(9), point], settings).level is Level.SOUND
    balanced = [RewardPoint(step=i, mean=0.0, low=-1.0, high=1.0) for i in range(50)]
    assert judge_rewards(balanced, settings).level is Level.SOUND


def test_the_bounds_of_probation():
    settings = with_settings(fall_threshold=None)
    assert judge_rewards(zeros(4, after=60), settings, restored_step=13).level is Level.ALERT
    assert judge_rewards(zeros(4, after=60), settings, restored_step=12).level is Level.SOUND
    strict = with_settings(fall_threshold=None, zero_alert_steps=1, zero_breaker_steps=None)
    assert judge_rewards(zeros(1, after=3), strict, restored_step=2).level is Level.ALERT
    assert judge_rewards(zeros(0, after=3), strict, restored_step=2).level is Level.SOUND


def test_what_a_verdict_says():
    points = [RewardPoint(step=step, mean=0.9 if step < 2 else 0.5, low=0.0, high=1.0) for step in range(12)]
    assert judge_rewards(points, SETTINGS).reason == "mean reward 0.5 over the last 10 steps"
    assert judge_rewards(points[:3], SETTINGS).reason == "mean reward 0.767 over the last 3 steps"
    assert judge_rewards(zeros(12, after=70), SETTINGS).reason.startswith("mean reward fell from 0.5 to 0 at about")
    assert judge_rewards(zeros(12, after=3), SETTINGS).reason == "every reward was 0 for 12 steps in a row"


@pytest.mark.parametrize(("first", "is_sharp"), [(0.19, True), (0.21, False)])
def test_an_edge_falls_most_of_the_way_in_its_first_step(first, is_sharp):
    """Its drop is from the mean of the last 20 steps before, its score from that of the last 50."""
    means = [*[0.51] * 30, *[0.5] * 20, first, 0.0, 0.0]
    points = [RewardPoint(step=7 + n, mean=mean, low=0.0, high=1.0) for n, mean in enumerate(means)]
    verdict = judge_rewards(points, with_settings(noise_floor=0.02))
    assert (verdict.onset_step, verdict.is_sharp) == (57, is_sharp)
    assert verdict.drop == pytest.approx(0.5 - first / 3)
    assert verdict.reason.startswith(f"mean reward fell from 0.506 to {first / 3:.3g} at about step 57 (")


def test_rewards_that_are_all_right_are_no_fault():
    points = [RewardPoint(step=step, mean=1.0, low=1.0, high=1.0) for step in range(100)]
    assert judge_rewards(points, SETTINGS).level is Level.SOUND


def test_a_mean_that_is_not_a_number_breaks():
    points = [*zeros(0, after=5), RewardPoint(step=5, mean=math.nan, low=0.0, high=1.0)]
    verdict = judge_rewards(points, SETTINGS)
    assert (verdict.level, verdict.onset_step) == (Level.BREAK, 5)


def test_no_steps_is_sound():
    assert judge_rewards([], SETTINGS) == RewardVerdict(level=Level.SOUND, reason="no step yet")


# ── whose fault ──

SOUND = RewardVerdict(level=Level.SOUND, reason="mean reward 0.60")
ALERT = RewardVerdict(level=Level.ALERT, reason="zeros", onset_step=40)
BROKE = RewardVerdict(level=Level.BREAK, reason="fell", onset_step=40)
CLEAR = CanaryVerdict(is_broken=False, reason="as they should be")
UNASKED = CanaryVerdict(is_broken=False, reason="none")
ACCUSED = CanaryVerdict(is_broken=True, reason="42 was scored 0, not 1", onset_step=44)
STALE = ServerFault(name="server-1", cause=Cause.SERVER_STALE, since_step=39)
LATER_CRASH = ServerFault(name="server-0", cause=Cause.SERVER_CRASH, since_step=47)


@pytest.mark.parametrize(
    ("rewards", "canaries", "faults", "cause", "subject", "onset"),
    [
        (SOUND, CLEAR, [], None, None, None),
        (SOUND, CLEAR, [STALE], None, None, None),
        (ALERT, CLEAR, [], None, None, None),
        (SOUND, ACCUSED, [], Cause.VERIFIER_BROKEN, "reward", 44),
        (BROKE, ACCUSED, [STALE], Cause.VERIFIER_BROKEN, "reward", 40),
        (BROKE, CLEAR, [STALE], Cause.SERVER_STALE, "server-1", 40),
        (BROKE, CLEAR, [LATER_CRASH, STALE], Cause.SERVER_STALE, "server-1", 40),
        (BROKE, CLEAR, [dataclasses.replace(STALE, since_step=43)], Cause.SERVER_STALE, "server-1", 40),
        (BROKE, CLEAR, [dataclasses.replace(STALE, since_step=44)], Cause.REWARD_COLLAPSE, "policy", 40),
        (BROKE, CLEAR, [dataclasses.replace(LATER_CRASH, since_step=37), STALE], Cause.SERVER_STALE, "server-1", 40),
        (BROKE, CLEAR, [LATER_CRASH], Cause.REWARD_COLLAPSE, "policy", 40),
        (BROKE, CLEAR, [], Cause.REWARD_COLLAPSE, "policy", 40),
        (BROKE, UNASKED, [], Cause.REWARD_COLLAPSE, "policy", 40),
    ],
)
def test_the_cause_is_told_apart(rewards, canaries, faults, cause, subject, onset):
    incident = find_cause(rewards, canaries, faults, since=7.0)
    if cause is None:
        assert incident is None
    else:
        assert (incident.cause, incident.subject, incident.onset_step, incident.since) == (cause, subject, onset, 7.0)
        assert incident.evidence["canaries"] == canaries.reason


def test_weights_may_have_been_damaged_as_much_earlier_as_a_batch_is_stale():
    onsets = [find_cause(BROKE, CLEAR, [], since=7.0, staleness=n).onset_step for n in (0, 3, 40, 50)]
    assert onsets == [40, 37, 0, 0]
    assert find_cause(BROKE, ACCUSED, [], since=7.0, staleness=3).onset_step == 40, "it is not the weights"
    nowhere = CanaryVerdict(is_broken=True, reason="it raised")
    assert find_cause(SOUND, nowhere, [], since=7.0).onset_step == 0


@pytest.mark.parametrize(
    ("usual", "streak", "level"),
    [
        (10, 19, Level.ALERT),
        (10, 20, Level.BREAK),
        (5, 4, Level.SOUND),
        (5, 5, Level.ALERT),
        (5, 10, Level.ALERT),
        (5, 11, Level.BREAK),
    ],
)
def test_how_many_zeros_in_a_row_are_chance_where_so_many_of_twenty_steps_had_none(usual, streak, level):
    settings = with_settings(zero_breaker_steps=1, zero_alert_steps=1, baseline_steps=20)
    means = [0.0] * usual + [0.5] * (20 - usual) + [0.0] * streak
    points = [RewardPoint(step=step, mean=mean, low=0.0, high=2 * mean) for step, mean in enumerate(means)]
    assert judge_zeros(points, settings).level is level


def test_thresholds_are_tighter_for_some_steps_after_a_restore_and_no_longer(monkeypatch):
    factors, sound = [], RewardVerdict(level=Level.SOUND, reason="")
    monkeypatch.setattr(reward_health, "_judge_fall", lambda *given: factors.append(given[2]) or sound)
    points = [RewardPoint(step=step, mean=0.5, low=0.0, high=1.0) for step in range(SETTINGS.probation_steps + 2)]
    for last in (-1, None):
        judge_rewards(points[:last], SETTINGS, restored_step=0)
    assert factors == [SETTINGS.probation_factor, 1.0]


@pytest.mark.parametrize(
    ("first", "now", "has_drifted"),
    [
        (1e-3, None, False),
        (1e-3, 4e-3, False),
        (1e-3, 4.1e-3, True),
        (1e-5, 1e-3, False),  # the rounding of any run
        (1e-5, 1.1e-3, True),
    ],
)
def test_a_distance_has_drifted_that_is_so_many_times_that_of_the_first_steps(first, now, has_drifted):
    said = distance_drifted(first, now, least=1e-3, factor=4.0)
    assert bool(said) is has_drifted
