"""The rewards in an AReaL log, as every tool reads them: of each step the one that counts."""

import math

import pytest

from launcher.checkpoints.areal_log import read_steps_per_epoch
from launcher.checkpoints.trial_folders import TrialFolder
from scripts.checkpoints.choosing import read_catalog
from tests.support.trial_names import trial_paths


def step(number, *tables):
    lines = [
        f"\x1b[92m(AReaL) 20251111-11:37:11.251 StatsLogger INFO: Epoch 1/2 Step 3/80 Train step {number}/160 done."
    ]
    for mean, low, high in tables:
        lines += [f"│ ppo_actor/loss │ -1.0e-09 │ grpo_actor/task_reward/avg │ {mean} │"]
        lines += [f"│ grpo_actor/task_reward/min │ {low} │ x │ 1 │ grpo_actor/task_reward/max │  {high} │"]
    return lines


def trial(logs):
    return TrialFolder(paths=trial_paths(logs), root=logs, logs=logs, recover_info=None, is_ours=False)


@pytest.fixture
def read(tmp_path):
    def write_and_read(*steps, name="trainer.log"):
        (tmp_path / name).write_text("\n".join(line for lines in steps for line in lines) + "\n")
        seen = read_catalog(trial(tmp_path)).health.seen
        return list(zip(seen.steps.tolist(), seen.rewards.tolist(), strict=True))

    return write_and_read


def test_each_step_counted_from_0(read):
    assert read(step(1, ("5.0e-01", "0.0", "1.0")), step(2, ("-2.5e-01", "-1.0", "0.0"))) == [(0, 0.5), (1, -0.25)]


def test_of_several_minibatches_the_mean_counts(read):
    assert read(step(1, (0.5, 0, 1), (0.9, 0, 1))) == [(0, pytest.approx(0.7))]


def test_after_a_recovery_the_later_line_stands(read):
    assert read(*(step(n, (n / 10, 0, 1)) for n in (1, 2, 3, 2, 3))) == [(0, 0.1), (1, 0.2), (2, 0.3)]


def test_a_step_without_rewards_and_numbers_that_are_none(read):
    found = read(step(1, (0.5, 0, 1)), step(2), step(3, ("nan", "nan", "inf")))
    assert found[0] == (0, 0.5)
    assert [number for number, _ in found] == [0, 1, 2]
    assert math.isnan(found[1][1])
    assert math.isnan(found[2][1])


def test_other_names_of_the_log_and_none_at_all(read, tmp_path):
    assert len(read_catalog(trial(tmp_path)).health.seen) == 0
    assert read_steps_per_epoch(tmp_path) is None
    assert read(step(1, (0.5, 0, 1)), name="merged.log") == [(0, 0.5)]
    assert read_steps_per_epoch(tmp_path) == 80
