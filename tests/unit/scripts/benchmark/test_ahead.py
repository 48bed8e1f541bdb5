"""Benchmark `ahead`: what it reads from metrics.jsonl, and the ratio that it prints."""

import pytest

from launcher.base.errors import UsageError
from scripts.benchmark.ahead import WARM_UP, AheadRun, compared, measured, read_run


def lines(steps, *, every_s):
    return [{"time": every_s * step, "rollout/tokens": 100, "rollout/reward": step / steps} for step in range(steps)]


def test_steps_after_the_warm_up_are_measured():
    run = read_run(1, lines(WARM_UP + 5, every_s=2.0))
    assert run.step_s == (2.0,) * 4 and run.tokens_per_s == 50.0 and len(run.reward) == WARM_UP + 5


def test_too_few_steps_are_refused():
    with pytest.raises(UsageError, match="give more --steps"):
        read_run(0, lines(WARM_UP, every_s=1.0))


def test_each_is_compared_with_the_one_that_makes_nothing_ahead():
    def run(ahead, step_s):
        return AheadRun(ahead=ahead, step_s=(step_s,) * 3, reward=(0.5,) * 20, tokens_per_s=1.0)

    found = measured([run(0, 3.0), run(2, 2.0), run(0, 6.0), run(2, 4.0)])
    assert found.ratios["steps a minute, 2 ahead ÷ 0"].value == pytest.approx(1.5)
    assert found.points["2 ahead: step_s"] == [2.0] * 3 + [4.0] * 3


@pytest.mark.slow
def test_older_tokens_are_compared_in_turns_with_a_step_that_compares_none():
    few = ["train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4"]
    found = compared(2, few)
    assert {name: len(figures) for name, figures in found.points.items()} == {
        "not compared: step_s": 2,
        "compared: step_s": 2,
    }
    assert found.ratios["a trainer's step, compared ÷ not"].value > 0
