"""Whether a plan has a parked trainer: by default where the host's memory has room for it, and the plan says which."""

from dataclasses import replace

import pytest

from launcher.checkpoints.model_files import read_shape
from launcher.config.supervision import RecoveryConfig
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB, MIB
from launcher.resources.run_plan import STANDBY, make_plan, with_standby_trainer
from tests.support.preflight_parts import NO_GPU, changed, printed
from tests.support.worlds.resources import ARITHMETIC, GSM8K, LARGE, MODEL, QWEN

LEFT = 100 * MIB
SMALL = read_shape(MODEL)


def plans(config, hardware, shape, wanted=None):
    """Without one, and as it is wanted."""
    without = make_plan(config, hardware, shape)
    config = replace(config, recovery=RecoveryConfig(standby_trainers=wanted))
    return without, with_standby_trainer(config, hardware, without)


def host(plan):
    return next(place for place in plan.places if place.gpu is None)


def parked(plan):
    return [one for one in plan.processes if one.placement.name == "standby trainer"]


@pytest.mark.parametrize("wanted", [None, 1])
def test_where_there_is_room_one_is_planned_and_its_memory_counted(wanted):
    without, plan = plans(ARITHMETIC, NO_GPU, SMALL, wanted)
    (one,) = parked(plan)
    assert plan.standby_trainers == 1
    assert host(plan).planned == host(without).planned + one.bytes
    said = printed(ARITHMETIC, plan, width=200)
    assert "standby trainer: on the CPU" in said
    assert "takes over when the trainer ends" in said
    assert f"recovery.standby_trainers={'null: 1' if wanted is None else 1}" in said


def test_beside_a_gpu_it_takes_memory_of_the_host_alone():
    without, plan = plans(GSM8K, LARGE, QWEN)
    (one,) = parked(plan)
    assert not one.placement.gpus
    assert one.bytes < 2 * GIB
    assert [place for place in plan.places if place.gpu is not None] == [
        place for place in without.places if place.gpu is not None
    ]


def test_of_several_ranks_each_has_one_and_the_memory_of_each_is_counted():
    config = changed(ARITHMETIC, actor__dp_size=2, train_dataset__batch_size=4)
    without, plan = plans(config, NO_GPU, SMALL)
    beside = [one for one in plan.processes if one.placement.kind == STANDBY]
    assert [one.placement.name for one in beside] == ["parked-0", "parked-1"]
    needed = host(without).planned
    assert host(plan).planned == needed + 2 * beside[0].bytes
    weights = sum(item.bytes for one in beside for item in one.items if item.what == "weights")
    assert weights == 4 * SMALL.parameters, "each holds its slice"
    assert "a second process of each of 2 trainer ranks" in plan.notes[-1]
    for_one = Hardware(gpus=(), cpus=2, memory=64 * GIB, memory_free=needed + beside[0].bytes, no_gpu="none")
    assert plans(config, for_one, SMALL)[1].standby_trainers == 0, "half of a parked trainer takes over from nobody"


def test_a_host_that_is_too_small_for_it_has_none_and_the_run_goes_on_without():
    without, plan = plans(ARITHMETIC, NO_GPU, SMALL)
    needed = host(without).planned
    for free, there in ((needed + LEFT, 64 * GIB), (64 * GIB, needed + LEFT)):
        small = Hardware(gpus=(), cpus=2, memory=there, memory_free=free, no_gpu="none")
        without, plan = plans(ARITHMETIC, small, SMALL)
        assert (plan.standby_trainers, parked(plan), host(plan)) == (0, [], host(without))
        assert "no trainer stands by: it takes" in plan.notes[-1]
        assert "0.1 GiB are left" in plan.notes[-1]
        assert plans(ARITHMETIC, small, SMALL, 1)[1].standby_trainers == 1, "it was asked for"


def test_a_host_too_small_for_the_run_itself_is_short_of_so_much_and_has_nothing_left():
    """It said "-1.6 GiB are left"."""
    without, _ = plans(ARITHMETIC, NO_GPU, SMALL)
    short = Hardware(gpus=(), cpus=2, memory=64 * GIB, memory_free=host(without).planned - GIB, no_gpu="none")
    _, plan = plans(ARITHMETIC, short, SMALL)
    assert "GiB, and 1.0 GiB are missing without it" in plan.notes[-1]
    assert "left" not in plan.notes[-1]
    assert "-" not in plan.notes[-1].partition(":")[2].partition("(")[0]


@pytest.mark.parametrize(
    ("config", "shape", "why"),
    [
        (changed(GSM8K, cluster__address="auto"), QWEN, "running cluster"),
        (GSM8K, None, "not known before the model is here"),
    ],
)
def test_what_can_not_be_parked_or_is_not_known_is_said(config, shape, why):
    _, plan = plans(config, replace(LARGE, gpus=LARGE.gpus * 3), shape)
    assert plan.standby_trainers == 0
    assert why in plan.notes[-1]


def test_none_is_planned_where_none_is_wanted():
    without, plan = plans(ARITHMETIC, NO_GPU, SMALL, 0)
    assert plan == without
