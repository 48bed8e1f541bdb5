"""Settings of supervision that contradict each other are named with key, value and what would be allowed."""

import dataclasses

import pytest

from launcher.base.errors import ConfigError
from launcher.config.schema import RunConfig
from launcher.config.supervision import HealthConfig, MemoryConfig, RestartConfig, RestoreConfig, RewardHealthConfig
from launcher.config.supervision_checks import find_contradictions
from launcher.resources.config_checks import check, find_problems
from tests.support.composed import composed


def test_the_defaults_contradict_nothing():
    assert list(find_contradictions(RunConfig())) == []


def sound_but(change):
    return dataclasses.replace(composed("conf=arithmetic_cpu"), **change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "key", "given", "words"),
    [
        ({"health": HealthConfig(silence_s=1.5)}, "health.silence_s", 1.5, "more than 1.5, one probe interval"),
        ({"health": HealthConfig(stopped_s=0.5)}, "health.stopped_s", 0.5, "more than 0.5, two looks"),
        ({"health": HealthConfig(proof_s=2.0)}, "health.proof_s", 2.0, "at least health.silence_s=3"),
        (
            {"reward_health": RewardHealthConfig(zero_alert_steps=11)},
            "reward_health.zero_alert_steps",
            11,
            "at most reward_health.zero_breaker_steps=10, or null",
        ),
        (
            {"reward_health": RewardHealthConfig(warmup_steps=60)},
            "reward_health.warmup_steps",
            60,
            "at most reward_health.baseline_steps=50",
        ),
        (
            {"restore": RestoreConfig(good_after_steps=9)},
            "restore.good_after_steps",
            9,
            "at least reward_health.zero_breaker_steps=10",
        ),
        ({"restart": RestartConfig(wait_initial_s=90.0)}, "restart.wait_initial_s", 90.0, "restart.wait_max_s=60"),
        ({"restart": RestartConfig(window_s=360.0)}, "restart.window_s", 360.0, "more than 360 (rollout.setup_timeout"),
        ({"memory": MemoryConfig(mem_fraction_static=[])}, "memory.mem_fraction_static", [], "numbers between 0 and 1"),
        ({"memory": MemoryConfig(mem_fraction_static=[0.5, 0.7])}, "memory.mem_fraction_static", [0.5, 0.7], "less"),
        ({"memory": MemoryConfig(mem_fraction_static=[80, 70])}, "memory.mem_fraction_static", [80, 70], "between"),
    ],
)
def test_a_contradiction_is_named(change, key, given, words):
    (problem,) = find_problems(sound_but(change))
    assert problem.subject == f"{key}={given}"
    assert words in problem.text


def test_switching_off_contradicts_nothing():
    off = RewardHealthConfig(zero_alert_steps=None, zero_breaker_steps=None, fall_threshold=None)
    assert list(find_contradictions(RunConfig(reward_health=off))) == []


def test_the_command_line_is_told_with_everything_else_that_is_wrong():
    config = composed("conf=arithmetic_cpu", "restart.window_s=30", "health.proof_s=1")
    with pytest.raises(ConfigError, match=r"(?s)health\.proof_s=1\.0: at least .*restart\.window_s=30\.0: more than"):
        check(config)
