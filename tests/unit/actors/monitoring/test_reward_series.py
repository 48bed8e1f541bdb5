"""What of a run's past its rewards are judged by: the steps that stand, and whether they are on probation."""

import pytest

from actors.monitoring.reward_series import RewardSeries
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.reward_health import Level, judge_rewards
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


def go_back(paths, step, **repair):
    append_line(paths.events, {"event": "repair.begun", "attempt": 1, "subject": "trainer", **repair})
    append_line(paths.events, {"event": "trainer.restored", "attempt": 1, "global_step": step})


def take(paths, steps, mean):
    for step in steps:
        figures = {f"grpo_actor/task_reward/{key}": value for key, value in {"avg": mean, "min": 0, "max": 1}.items()}
        append_line(paths.metrics, {"attempt": 1, "global_step": step, **figures})


def test_what_went_back_from_an_onset_is_on_probation(paths):
    series = RewardSeries(paths)
    go_back(paths, 11, cause="nonfinite", onset_step=13, restored_step=11)
    assert series.refresh()
    assert series.restored_step == 11


@pytest.mark.parametrize(
    "repair",
    [
        {"cause": "checkpoint_corrupt", "onset_step": None, "restored_step": -1},  # the beginning of every run
        {"cause": "trainer_crash", "onset_step": None, "restored_step": None},
        {"cause": "checkpoint_corrupt", "onset_step": None, "restored_step": 46},  # what follows a crash
    ],
)
def test_a_beginning_and_a_crash_are_not(paths, repair):
    take(paths, range(60), 0.9)
    series = RewardSeries(paths)
    go_back(paths, 46, **repair)
    series.refresh()
    assert (series.restored_step, series.next_step) == (None, 47)


def test_a_dip_after_a_crash_is_judged_as_any_other(paths):
    """Seen in a storm: 0.943 to 0.852 for six steps, 4.8 standard errors, and 27 good steps were thrown away."""
    take(paths, range(80), 0.94)
    go_back(paths, 79, cause="trainer_crash", onset_step=None, restored_step=None)
    take(paths, range(80, 86), 0.848)
    series, settings = RewardSeries(paths), RewardHealthConfig()
    assert judge_rewards(series.points, settings, restored_step=series.restored_step).level is Level.SOUND
    assert judge_rewards(series.points, settings, restored_step=79).level is Level.BREAK
