"""What the steps and checkpoints of another project's trainer show: damage, wholeness, what may be gone back to."""

import math
import random
from pathlib import Path

import pytest

from launcher.adapters.foreign_health import (
    facts_of,
    find_damage,
    metrics_line,
    points_of,
    report_every,
    restore_verdict,
    why_not_whole,
)
from launcher.adapters.trainer_adapter import FoundCheckpoint, StepSeen
from launcher.base.messages import Cause
from launcher.config.schema import RunConfig
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.restore import choose, first_damaged, for_reports
from launcher.policy.reward_health import judge_rewards

SETTINGS = RewardHealthConfig()


def lines_of(rewards, first=1, **seen):
    return [
        metrics_line(StepSeen(step=step, reward=reward, **seen), attempt=1, time=float(step), step_s=1.0)
        for step, reward in enumerate(rewards, first)
    ]


def damage_of(lines, settings=SETTINGS):
    verdict = judge_rewards(points_of(lines), settings)
    return find_damage(lines, verdict, settings, since=0.0)


def noisy(mean, count):
    return [mean + 0.02 * math.sin(7.0 * number) for number in range(count)]


def test_a_line_holds_what_was_seen_and_nothing_else():
    assert metrics_line(StepSeen(step=3), attempt=2, time=5.0, step_s=None) == {
        "global_step": 3,
        "attempt": 2,
        "time": 5.0,
    }
    line = metrics_line(StepSeen(step=3, nonfinite=("reward",)), attempt=2, time=5.0, step_s=0.5)
    assert math.isnan(line["rollout/reward"])
    assert line["trainer/nonfinite"] == 1


@pytest.mark.parametrize(
    ("rewards", "seen", "cause", "onset"),
    [
        (noisy(0.6, 60), {}, None, None),
        ([*noisy(0.6, 40), *noisy(0.05, 12)], {}, Cause.REWARD_COLLAPSE, 41),
        ([*noisy(0.6, 10), *[0.0] * 10], {}, Cause.REWARD_COLLAPSE, 11),
        ([*noisy(0.6, 4), *[0.0] * 9], {}, None, None),
        ([0.0] * 30, {"spread": 1.0}, None, None),
        ([None] * 30, {}, None, None),
    ],
)
def test_the_policies_judge_the_rewards_of_another_trainer(rewards, seen, cause, onset):
    found = damage_of(lines_of(rewards, **seen))
    assert (None if found is None else found.cause) == cause
    if found is not None:
        assert abs(found.onset_step - onset) <= 1


def test_two_steps_in_a_row_that_are_not_finite_are_damage_and_one_is_not():
    healthy, bad = lines_of(noisy(0.6, 20)), lines_of([0.6, 0.6], first=21, nonfinite=("loss",))
    assert damage_of([*healthy, bad[0]]) is None
    found = damage_of([*healthy, *bad])
    assert (found.cause, found.onset_step) == (Cause.NONFINITE, 21)


def found_at(step, changed_at=0.0, is_whole=None, problem=""):
    return FoundCheckpoint(
        step=step, path=Path(f"step-{step}"), changed_at=changed_at, is_whole=is_whole, problem=problem
    )


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        (found_at(5, is_whole=True, changed_at=99.0), True),
        (found_at(5, is_whole=False, problem="torn"), False),
        (found_at(5, changed_at=6.5), True),  # step 7 was seen later
        (found_at(5, changed_at=7.5), False),
        (found_at(7, changed_at=1.0), False),  # no later step
    ],
)
def test_a_checkpoint_without_a_last_file_is_whole_once_a_later_step_was_seen_after_it(found, whole):
    assert (not why_not_whole(found, lines_of([0.5] * 7))) == whole


def test_a_checkpoint_is_good_after_as_many_healthy_steps_as_the_launchers_own():
    found = [found_at(step) for step in (5, 10, 15)]
    facts = facts_of(found, {found[1].path: "torn"}, lines_of([0.5] * 15), RunConfig())
    assert [(one.status, one.is_complete) for one in facts] == [
        (CheckpointStatus.GOOD, True),
        (CheckpointStatus.UNVERIFIED, False),
        (CheckpointStatus.CANDIDATE, True),
    ]


@pytest.mark.parametrize(
    ("since", "is_decided", "steps"),
    [
        ([], False, None),
        ([0.5], True, None),
        ([0.0], True, ""),
        ([0.25], False, None),
        ([0.25, 0.5], True, None),
        ([0.25, 0.25], True, " in 2 steps"),
        ([0.39] * 4, False, None),
        ([0.39] * 5, True, None),
        ([0.39] * 5 + [0.0], True, None),
    ],
)
def test_the_first_steps_after_a_restore_bear_it_out_or_contradict_it_together(since, is_decided, steps):
    saved = [0.5 + random.Random(number).gauss(0, 0.08) for number in range(60)]
    found = restore_verdict(points_of(lines_of([*saved, *since])), 60, SETTINGS)
    assert (found[0], bool(found[1])) == (is_decided, steps is not None)
    if steps is not None:
        earned = sum(saved[-20:]) / 20
        assert f"earn {since[0]:.3g} now{steps}, and earned {earned:.3g} when they were saved" in found[1]


@pytest.mark.parametrize("earned", [0, 4])
def test_where_too_little_is_known_of_what_a_checkpoint_earned_its_next_step_decides(earned):
    """A trainer may report no rewards at all, and its steps are written once that is decided."""
    assert restore_verdict(points_of(lines_of([0.5] * earned)), earned, SETTINGS) == (True, "")


def each_tenth(lines):
    return [{**line, "global_step": line["global_step"] * 10} for line in lines]


def test_of_a_trainer_that_reports_each_tenth_step_no_checkpoint_since_the_last_sound_report_is_trusted():
    rewards = [*noisy(0.6, 10), 0.1, *[0.0] * 10]  # it broke in the midst of the ten steps of report 110
    found = damage_of(each_tenth(lines_of(rewards)))
    assert found.cause is Cause.REWARD_COLLAPSE
    assert first_damaged(found) <= 100
    saved = [CheckpointFacts(global_step=step, status=CheckpointStatus.GOOD) for step in range(5, 215, 5)]
    chosen = choose(saved, found, [], RunConfig().restore).global_step
    assert 80 <= chosen <= 100
    healthy, bad = lines_of(noisy(0.6, 20)), lines_of([0.6, 0.6], first=21, nonfinite=("loss",))
    found = damage_of(each_tenth([*healthy, *bad]))
    assert (found.cause, found.onset_step) == (Cause.NONFINITE, 191)


def test_a_margin_of_steps_is_one_of_reports():
    settings, lines = RunConfig().restore, lines_of(noisy(0.6, 30))
    assert [report_every(some) for some in (lines, [], each_tenth(lines))] == [1, 1, 10]
    assert for_reports(settings, 1) == settings
    tenth = for_reports(settings, 10)
    assert tenth.onset_margin_steps == 10 * settings.onset_margin_steps
    assert tenth.same_place_steps == 10 * settings.same_place_steps
    assert tenth.good_after_steps == settings.good_after_steps
