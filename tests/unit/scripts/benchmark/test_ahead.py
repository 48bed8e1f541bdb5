"""Benchmark `ahead`: what it reads from metrics.jsonl, and the ratio that it prints."""

import pytest

from scripts.benchmark.ahead import WARM_UP, AheadRun, measured, report


def lines(steps, *, every_s):
    return [{"time": every_s * step, "rollout/tokens": 100, "rollout/reward": step / steps} for step in range(steps)]


def test_steps_after_the_warm_up_are_measured():
    run = measured(1, lines(WARM_UP + 5, every_s=2.0))
    assert run.step_s == (2.0,) * 4 and run.tokens_per_s == 50.0 and len(run.reward) == WARM_UP + 5


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="give more --steps"):
        measured(0, lines(WARM_UP, every_s=1.0))


def test_each_is_compared_with_the_one_that_makes_nothing_ahead(capsys):
    def run(ahead, step_s):
        return AheadRun(ahead=ahead, step_s=(step_s,) * 3, reward=(0.5,) * 20, tokens_per_s=1.0)

    result = report([run(0, 3.0), run(2, 2.0), run(0, 6.0), run(2, 4.0)])
    assert result["steps_a_minute_ratio"][2]["value"] == pytest.approx(1.5)
    assert "1.500" in capsys.readouterr().out
