"""An edge is a fall whose first step lies most of the way down, beyond the noise, and whose steps before were sound."""

import pytest

from launcher.config.supervision import RewardHealthConfig
from launcher.policy.reward_health import Level, RewardPoint, judge_rewards

SHORT = {"baseline_steps": 4, "window_steps": 5, "warmup_steps": 2, "fall_threshold": 3.0}


@pytest.mark.parametrize(
    ("means", "change", "is_sharp"),
    [
        ([*[0.5] * 50, 0.125, 0.0, 0.0, 0.0], {"noise_floor": 0.125}, False),  # three times the noise
        ([*[0.5] * 50, 0.12, 0.0, 0.0, 0.0], {"noise_floor": 0.125}, True),
        ([*[0.5] * 50, 0.2, 0.1, 0.1], {"noise_floor": 0.02}, True),
        ([0.5, 0.3, *[0.0] * 5], SHORT, True),
        ([*[0.1] * 5, 0.5, 0.0, 0.0], SHORT | {"baseline_steps": 1, "window_steps": 7}, False),
    ],
)
def test_which_falls_are_sharp(means, change, is_sharp):
    points = [RewardPoint(step=step, mean=mean, low=0.0, high=1.0) for step, mean in enumerate(means)]
    verdict = judge_rewards(points, RewardHealthConfig(**change))
    assert (verdict.level, verdict.is_sharp) == (Level.BREAK, is_sharp)
