"""The rewards in an AReaL log: of each step the one that stands, whatever else the log says."""

import math

import pytest

from launcher.checkpoints.areal_log import read_areal_rewards, read_steps_per_epoch


def step(number, *tables):
    lines = [
        f"\x1b[92m(AReaL) 20251111-11:37:11.251 StatsLogger INFO: Epoch 1/2 Step 3/80 Train step {number}/160 done."
    ]
    for mean, low, high in tables:
        lines += [f"│ ppo_actor/loss │ -1.0e-09 │ grpo_actor/task_reward/avg │ {mean} │"]
        lines += [f"│ grpo_actor/task_reward/min │ {low} │ x │ 1 │ grpo_actor/task_reward/max │  {high} │"]
    return lines


@pytest.fixture
def read(tmp_path):
    def write_and_read(*steps, name="trainer.log", **how):
        (tmp_path / name).write_text("\n".join(line for lines in steps for line in lines) + "\n")
        return [(point.step, point.mean) for point in read_areal_rewards(tmp_path, **how)]

    return write_and_read


def test_each_step_counted_from_0(read):
    assert read(step(1, ("5.0e-01", "0.0", "1.0")), step(2, ("-2.5e-01", "-1.0", "0.0"))) == [(0, 0.5), (1, -0.25)]


def test_of_several_minibatches_the_first_tells(read):
    assert read(step(1, (0.5, 0, 1), (0.9, 0, 1))) == [(0, 0.5)]


def test_after_a_recovery_the_later_line_stands(read):
    assert read(*(step(n, (n / 10, 0, 1)) for n in (1, 2, 3, 2, 3))) == [(0, 0.1), (1, 0.2), (2, 0.3)]


def test_a_step_without_rewards_and_numbers_that_are_none(read):
    found = read(step(1, (0.5, 0, 1)), step(2), step(3, ("nan", "nan", "inf")))
    assert found[0] == (0, 0.5) and found[1][0] == 2 and math.isnan(found[1][1])


def test_of_a_log_too_large_its_end_is_read(read):
    steps = [step(n, (n / 100, 0, 1)) for n in range(1, 51)]
    assert read(*steps, largest=3000)[-1] == (49, 0.5)
    assert 3 <= len(read(*steps, largest=3000)) < 50


def test_other_names_of_the_log_and_none_at_all(read, tmp_path):
    assert read_areal_rewards(tmp_path) == () and read_steps_per_epoch(tmp_path) is None
    assert read(step(1, (0.5, 0, 1)), name="merged.log") == [(0, 0.5)]
    assert read_steps_per_epoch(tmp_path) == 80
