"""Where torch's memory segments may grow, and in whose environment that is."""

from types import SimpleNamespace

import pytest

from actors.cluster.placement_group import ALLOCATOR, ITS_OLD_NAME, RunPlacement, allocator_variables
from launcher.resources.placement import place
from tests.support.composed import composed
from tests.support.preflight_parts import changed

ON_ONE_GPU = composed("conf=gsm8k_h200")
GROWS = {ALLOCATOR: "expandable_segments:True"}


def placement(config, device):
    placed = place(config, servers_on=device, trainer_on=device)
    return RunPlacement(placed=placed, group=SimpleNamespace(), on_gpu=allocator_variables(config, {}))


def variables(options):
    return options.get("runtime_env", {}).get("env_vars", {})


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("disk", {}, GROWS),
        ("xccl", {}, GROWS),
        ("tensor", {}, {}),
        ("disk", {ITS_OLD_NAME: "max_split_size_mb:64"}, {}),
        ("disk", {ALLOCATOR: "expandable_segments:False"}, {}),
    ],
)
def test_segments_grow_unless_tensors_are_shared_or_a_person_chose(mode, environment, expected):
    assert allocator_variables(changed(ON_ONE_GPU, actor__weight_update_mode=mode), environment) == expected


@pytest.mark.parametrize(
    ("mode", "device", "expected"), [("disk", "cuda", GROWS), ("tensor", "cuda", {}), ("disk", "cpu", {})]
)
def test_a_trainer_on_a_gpu_has_the_variables_in_both_its_actors_and_a_server_has_not(mode, device, expected):
    config = changed(ON_ONE_GPU, actor__weight_update_mode=mode)
    placed = placement(config, device)
    assert variables(placed.options("trainer")) == expected
    standby = placed.options_of_standby("parked", config)
    assert variables(standby).pop("OMP_NUM_THREADS") == str(int(config.actor.num_cpus))
    assert (standby["name"], standby["num_gpus"], variables(standby)) == ("parked", 0, expected)
    assert variables(placed.options("server-0")) == {}


def test_each_further_rank_has_them_too():
    config = composed("conf=gsm8k_h200_cluster")
    placed = placement(changed(config, actor__weight_update_mode="xccl"), "cuda")
    ranks = placed.further_ranks()
    assert [variables(one) for one in ranks] == [GROWS] * (config.actor.dp_size - 1)
    assert all(GROWS.items() <= variables(one).items() for one in placed.further_ranks_of_standby(config))
    assert all("name" not in one for one in ranks)
