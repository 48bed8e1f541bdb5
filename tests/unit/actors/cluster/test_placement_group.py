"""Where torch's memory segments may grow, and in whose environment that is."""

from types import SimpleNamespace

import pytest

from actors.cluster import placement_group as module
from actors.cluster.placement_group import ALLOCATOR, ITS_OLD_NAME, RunPlacement, allocator_variables
from launcher.resources.placement import NodeResources, place
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


def test_on_a_cluster_that_the_run_joins_the_nodes_choose():
    """What a person has set where a node's Ray was started can't be seen from here."""
    assert allocator_variables(changed(ON_ONE_GPU, cluster__address="auto"), {}) == {}


def test_what_a_run_has_booked_sets_them(monkeypatch):
    for name in (ALLOCATOR, ITS_OLD_NAME):
        monkeypatch.delenv(name, raising=False)
    node = NodeResources(name="here", gpus=1.0, cpus=64.0)
    monkeypatch.setattr(module, "cluster_nodes", lambda config: (node,))
    monkeypatch.setattr(module, "placement_group", lambda bundles, strategy: SimpleNamespace(wait=lambda within: True))
    assert variables(RunPlacement.book(ON_ONE_GPU).options("trainer")) == GROWS


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
    config = changed(composed("conf=gsm8k_h200_cluster"), cluster__address="local")
    placed = placement(changed(config, actor__weight_update_mode="xccl"), "cuda")
    ranks = placed.further_ranks()
    assert [variables(one) for one in ranks] == [GROWS] * (config.actor.dp_size - 1)
    assert all(GROWS.items() <= variables(one).items() for one in placed.further_ranks_of_standby(config))
    assert all("name" not in one for one in ranks)
