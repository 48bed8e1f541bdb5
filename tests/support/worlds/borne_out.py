"""A HealthMonitor whose known answers and restored weights show what changed."""

import pytest

from launcher.base.messages import Cause
from launcher.policy.canary_policy import compare_replayed, compare_rescored
from tests.support.worlds.health_monitor import World, batch

KNOWN = [(1.0, 1.0, 1.0)] * 24
SOUND = compare_rescored(KNOWN, [1.0] * 24)


def replayed(then, now, steps=()):
    def rewards(rate):
        return [[1.0] * round(10 * rate) + [0.0] * (10 - round(10 * rate))] * 32

    return compare_replayed(rewards(then), rewards(now), steps)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.config.gate.max_reward_jump = None
    return made


def offered(monitor, step, mean=0.5, **more):
    high = 1.0 if mean else 0.0
    return monitor.admit(batch(step, mean_reward=mean, high_reward=high, canaries=(), can_check=True, **more))


def checked(monitor, step, mean, rescored=SOUND, again=None):
    return monitor.admit(batch(step, mean_reward=mean, canaries=(rescored,), replayed=again))


def healthy(monitor, steps, first=0):
    for step in range(first, first + steps):
        assert offered(monitor, step, 0.5 + 0.04 * (-1) ** step).admitted


def fall(monitor):
    healthy(monitor, 45)
    step = 45
    while monitor.report().incident is None:
        assert offered(monitor, step, 0.0).check_before is not None
        checked(monitor, step, 0.0, again=replayed(0.5, 0.0))
        step += 1
    assert monitor.report().incident.cause is Cause.REWARD_COLLAPSE
