"""How many standbys a run has: by default as memory allows, and what is said of those that it can't have."""

from dataclasses import replace

import pytest

from launcher.base.errors import ConfigError
from launcher.checkpoints.model_files import read_shape
from launcher.config.supervision import RecoveryConfig
from launcher.resources.config_checks import check
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_machine import missing_gpus, missing_memory
from launcher.resources.run_plan import make_plan
from tests.support.preflight_parts import NO_GPU, changed, printed
from tests.unit.launcher.resources.test_run_plan import ARITHMETIC, GSM8K, LARGE, MODEL, QWEN

TWO_GPUS = replace(LARGE, gpus=LARGE.gpus * 2, memory=256 * GIB)
SMALL = read_shape(MODEL)


def plan_of(config, hardware, shape, standbys):
    return make_plan(replace(config, recovery=RecoveryConfig(standby_servers=standbys)), hardware, shape)


def servers(plan):
    return [one.placement.name for one in plan.processes if one.placement.name.startswith("server")]


def problems(config, hardware, plan):
    return [str(error) for error in (*missing_gpus(config, hardware, plan), *missing_memory(plan))]


def test_on_the_cpu_there_is_none_unless_asked_for_and_the_plan_says_why():
    plan = plan_of(ARITHMETIC, NO_GPU, SMALL, None)
    assert (plan.standbys, servers(plan)) == (0, ["server-0"])
    assert "no standby server: on the CPU its start takes time from the steps" in printed(ARITHMETIC, plan, width=160)
    asked = plan_of(ARITHMETIC, NO_GPU, SMALL, 1)
    assert (asked.standbys, servers(asked)) == (1, ["server-0", "server-1"])
    assert "server-1: without traffic, in place of a server that is lost" in printed(ARITHMETIC, asked, width=160)
    assert sum(place.planned for place in asked.places) > sum(place.planned for place in plan.places) + 2 * GIB


def test_where_a_further_gpu_is_free_there_is_one():
    exclusive = changed(GSM8K, sglang__gpu_fraction=1.0, actor__gpu_fraction=1.0)
    three = replace(TWO_GPUS, gpus=LARGE.gpus * 3)
    plan = plan_of(exclusive, three, QWEN, None)
    assert (plan.standbys, servers(plan)) == (1, ["server-0", "server-1"])
    full = plan_of(exclusive, TWO_GPUS, QWEN, None)
    assert (full.standbys, full.shortage) == (0, None)
    assert any("no standby server: with one, GPUs:" in note for note in full.notes)


def test_a_gpu_that_can_not_hold_a_second_engine_beside_the_first_gets_none():
    plan = plan_of(GSM8K, LARGE, QWEN, None)
    assert plan.standbys == 0 and any("no standby server" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("config", "shape", "why"),
    [
        (changed(GSM8K, cluster__address="auto"), QWEN, "running cluster"),
        (GSM8K, None, "not known before the model is here"),
    ],
)
def test_what_is_not_known_is_no_reason_to_start_one(config, shape, why):
    plan = plan_of(config, TWO_GPUS, shape, None)
    assert plan.standbys == 0 and any(why in note for note in plan.notes)


def test_more_than_memory_allows_is_one_message_that_names_the_key():
    plan = plan_of(ARITHMETIC, NO_GPU, SMALL, 40)
    (told,) = problems(ARITHMETIC, NO_GPU, plan)
    assert told.startswith("recovery.standby_servers: host memory:") and "lower it" in told
    assert servers(plan) == ["server-0"] and plan.standbys == 0
    (gpus,) = problems(GSM8K, LARGE, plan_of(changed(GSM8K, sglang__gpu_fraction=1.0), TWO_GPUS, QWEN, 5))
    assert gpus.startswith("recovery.standby_servers: GPUs:")


def test_what_is_missing_without_a_standby_too_is_not_blamed_on_it():
    tiny = Hardware(gpus=(), cpus=2, memory=2 * GIB, memory_free=2 * GIB, no_gpu="none")
    (told,) = problems(ARITHMETIC, tiny, plan_of(ARITHMETIC, tiny, SMALL, 1))
    assert told.startswith("memory: host memory")


def test_a_negative_number_is_refused_with_the_key():
    with pytest.raises(ConfigError, match=r"recovery\.standby_servers=-1"):
        check(replace(ARITHMETIC, recovery=RecoveryConfig(standby_servers=-1)))
