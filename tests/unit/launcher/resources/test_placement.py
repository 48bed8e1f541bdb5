"""Who gets which GPU of which node, what is said where there is no room, and what is true whatever is asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.errors import ConfigError
from launcher.resources.config_checks import check
from launcher.resources.placement import RANK, NodeResources, gpus_needed, place
from tests.support.composed import composed
from tests.support.preflight_parts import ARITHMETIC, changed

GSM8K = composed("conf=gsm8k_h200")
CLUSTER = composed("conf=gsm8k_h200_cluster")


def alone(**keys):
    """Servers and ranks that book whole GPUs."""
    return changed(GSM8K, **{"sglang__gpu_fraction": 1.0, "actor__gpu_fraction": 1.0, **keys})


def nodes(*gpus, cpus=100.0):
    return [NodeResources(name=f"node {number}", gpus=count, cpus=cpus) for number, count in enumerate(gpus)]


def placed(config, on, device="cuda"):
    return place(config, servers_on=device, trainer_on=device, nodes=on)


def where(config, on):
    return {one.name: (one.node, one.gpus) for one in placed(config, on).processes}


def shortage(config, on):
    """Message and hint; the bundles are then all on one node without limits."""
    found = placed(config, on)
    assert {one.node for one in found.processes} == {0}
    return found.shortage.message, found.shortage.hint


# ── who is where ──


def test_two_nodes_of_eight_servers_on_one_and_ranks_on_the_other():
    found = where(CLUSTER, nodes(8, 8))
    assert {found[name][0] for name in found if name.startswith("trainer")} == {0}
    assert [found[f"server-{index}"] for index in range(8)] == [(1, (index,)) for index in range(8)]


def test_colocated_each_rank_shares_its_gpu_with_a_server():
    config = changed(GSM8K, actor__dp_size=8, sglang__n_servers=8)
    found = where(config, nodes(8))
    assert [found[f"server-{index}"] for index in range(8)] == [(0, (index,)) for index in range(8)]
    assert {gpus for name, (_, gpus) in found.items() if name.startswith("trainer")} == {(gpu,) for gpu in range(8)}


def test_no_two_ranks_share_a_gpu_however_little_each_books():
    found = where(changed(GSM8K, actor__dp_size=4, actor__gpu_fraction=0.1), nodes(8))
    assert len({found[name] for name in found if name.startswith("trainer")}) == 4


def test_a_server_is_not_spread_over_nodes():
    config = alone(sglang__tp_size=2, sglang__dp_size=4)
    assert where(config, nodes(4, 8, 1))["server-0"] == (1, tuple(range(8)))
    assert shortage(config, nodes(4, 4, 4))


def test_ranks_stay_on_one_node_where_one_holds_them_all():
    assert {node for name, (node, _) in where(alone(actor__dp_size=4), nodes(2, 4)).items() if "trainer" in name} == {1}
    spread = [node for name, (node, _) in where(alone(actor__dp_size=5), nodes(2, 4)).items() if "trainer" in name]
    assert sorted(spread) == [0, 0, 1, 1, 1]


def test_ranks_are_apart_where_together_they_leave_no_room_for_a_server():
    found = where(alone(sglang__tp_size=6, actor__dp_size=5), nodes(8, 4))
    assert found["server-0"] == (0, (0, 1, 2, 3, 4, 5))
    assert sorted(node for name, (node, _) in found.items() if "trainer" in name) == [0, 0, 1, 1, 1]


def test_ranks_over_several_nodes_are_one_bundle_on_each_and_mix_with_no_server():
    found = placed(alone(actor__dp_size=16, sglang__n_servers=8), nodes(8, 8, 8))
    assert sorted(bundle.gpus for bundle in found.bundles) == [1] * 8 + [8, 8]
    assert {one.node for one in found.processes if one.kind == RANK} == {0, 1}


def test_spread_uses_every_node():
    config = changed(ARITHMETIC, cluster__placement="SPREAD", sglang__n_servers=2, actor__dp_size=2)
    found = placed(config, nodes(0, 0, 0, 0), device="cpu")
    assert sorted(one.node for one in found.processes) == [0, 1, 2, 3]
    assert len(found.bundles) == 4


def test_cpus_bound_what_a_node_holds():
    config = changed(ARITHMETIC, sglang__n_servers=3, sglang__num_cpus=2.0)
    found = placed(config, nodes(0, 0, cpus=4), device="cpu")
    assert sorted(one.node for one in found.processes) == [0, 0, 1, 1]


# ── bundles ──


def test_ranks_of_a_node_are_one_bundle_and_each_server_is_its_own():
    booked = placed(CLUSTER, nodes(8, 8)).bundles
    assert sorted(len(bundle.names) for bundle in booked) == [1] * 8 + [8]
    (ranks,) = (bundle for bundle in booked if len(bundle.names) == 8)
    assert ranks.resources == {"GPU": 8.0, "CPU": 64.0}


def test_who_shares_a_gpu_shares_its_bundle():
    (bundle,) = placed(GSM8K, nodes(1)).bundles
    assert bundle.names == ("server-0", "trainer")
    assert bundle.resources == {"GPU": 1.0, "CPU": 2.0}


def test_a_bundle_is_never_empty():
    config = changed(ARITHMETIC, sglang__num_cpus=0.0, actor__num_cpus=0.0)
    assert all(bundle.resources for bundle in placed(config, nodes(0), device="cpu").bundles)


# ── what can't be ──


GPU_KEY, CPU_KEY = "lower sglang.n_servers", "lower sglang.num_cpus"


@pytest.mark.parametrize(
    ("config", "on", "key"),
    [
        (alone(actor__dp_size=8, sglang__n_servers=9), nodes(8, 8), GPU_KEY),
        (alone(sglang__tp_size=8), nodes(4), "lower sglang.tp_size, or take larger nodes"),
        (alone(sglang__tp_size=4, sglang__n_servers=2), nodes(7, 2), GPU_KEY),
        (changed(GSM8K, actor__gpu_fraction=0.6), nodes(1), GPU_KEY),
        (changed(GSM8K, actor__dp_size=3), nodes(2), GPU_KEY),
        (alone(sglang__num_cpus=64.0, sglang__n_servers=2), nodes(8, cpus=100), CPU_KEY),
        (alone(sglang__num_cpus=101.0), nodes(8, 8, cpus=100), CPU_KEY),
        (alone(), nodes(0), GPU_KEY),
        (alone(sglang__num_cpus=101.0), nodes(0, cpus=100), "lower sglang.num_cpus, or take larger nodes"),
        (alone(), [], GPU_KEY),
    ],
)
def test_what_has_no_room_is_refused_with_the_settings_that_ask_for_less(config, on, key):
    assert shortage(config, on)[1].startswith(key)


def test_what_is_asked_for_is_told_by_role_and_what_there_is_in_all():
    config = alone(actor__dp_size=8, sglang__n_servers=9, sglang__num_cpus=0.5)
    assert shortage(config, nodes(8, 8)) == (
        "17 GPUs and 12.5 CPUs are asked for: 8 × 1 GPU and 1 CPU (1 trainer rank), 9 × 1 GPU and 0.5 CPUs (1 server); "
        "2 nodes with 16 GPUs and 200 CPUs in all",
        "lower sglang.n_servers, sglang.tp_size, sglang.dp_size or actor.dp_size, let them share a GPU "
        "(sglang.gpu_fraction, actor.gpu_fraction), or join a cluster with more nodes (cluster.address, "
        "cluster.n_nodes)",
    )


@pytest.mark.parametrize(
    ("config", "larger", "keys"),
    [
        (alone(sglang__tp_size=16, actor__num_cpus=0.0), "16 GPUs and 1 CPU (1 server)", "sglang.tp_size"),
        (alone(sglang__dp_size=16, actor__num_cpus=0.0), "16 GPUs and 1 CPU (1 server)", "sglang.dp_size"),
        (
            alone(sglang__tp_size=8, sglang__dp_size=2, actor__num_cpus=0.0),
            "16 GPUs and 1 CPU (1 server)",
            "sglang.tp_size or sglang.dp_size",
        ),
        (alone(sglang__num_cpus=101.0), "1 GPU and 101 CPUs (1 server)", "sglang.num_cpus"),
        (alone(actor__num_cpus=101.0), "1 GPU and 101 CPUs (1 trainer rank)", "actor.num_cpus"),
        (
            changed(GSM8K, actor__num_cpus=60.0, sglang__num_cpus=60.0),
            "1 GPU and 120 CPUs (1 server and 1 trainer rank)",
            "sglang.num_cpus or actor.num_cpus",
        ),
    ],
)
def test_what_no_node_alone_can_hold_is_told_with_the_keys_that_make_it_smaller(config, larger, keys):
    """16 GPUs for one server were refused with "2 nodes with 16 GPUs in all", and the advice to add nodes; and with
    keys among them that change nothing, as the number of servers."""
    said, hint = shortage(changed(config, cluster__address="auto"), nodes(8, 12))
    assert f"; no node alone has {larger}; 2 nodes with 20 GPUs and 200 CPUs in all" in said
    assert hint == f"lower {keys}, or take larger nodes"


N_GPUS, N_CPUS = "cluster.n_gpus_per_node", "hardware.n_cpus_per_node"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (alone(sglang__tp_size=16, cluster__n_gpus_per_node=8), f"{N_GPUS}=8: 17 GPUs and 2 CPUs are asked for: "),
        (changed(CLUSTER, sglang__tp_size=4, sglang__dp_size=8), "8 × 32 GPUs and 8 CPUs (1 server)"),
        (changed(CLUSTER, actor__dp_size=9), f"{N_GPUS}=8: 17 GPUs and 136 CPUs are asked for: "),
        (
            changed(CLUSTER, sglang__dp_size=2, sglang__gpu_fraction=0.5),
            "sglang.gpu_fraction=0.5: 1 with sglang.tp_size=1 × sglang.dp_size=2",
        ),
        (
            changed(CLUSTER, sglang__tp_size=8, sglang__dp_size=2, sglang__n_servers=1, actor__device="cpu"),
            f"{N_GPUS}=8: 16 GPUs and 72 CPUs are asked for: 16 GPUs and 8 CPUs (1 server), ",
        ),
        (changed(CLUSTER, cluster__n_nodes=1), f"{N_GPUS}=8: 16 GPUs"),
        (changed(CLUSTER, sglang__num_cpus=100.0), f"{N_CPUS}=192: 16 GPUs and 864 CPUs are asked for: "),
        (changed(CLUSTER, actor__gpu_fraction=1.5), "actor.gpu_fraction=1.5: allowed: more than 0 and at most 1"),
        (changed(CLUSTER, sglang__gpu_fraction=0.0), "sglang.gpu_fraction=0.0: allowed: more than 0"),
        (changed(CLUSTER, cluster__placement="pack"), "cluster.placement=pack: allowed: PACK, SPREAD"),
        (changed(ARITHMETIC, sglang__dp_size=2), "sglang.dp_size=2: 1 with sglang.device=cpu"),
        (
            changed(CLUSTER, sglang__extra_args={"nnodes": 2}),
            "sglang.extra_args.nnodes=2: the launcher sets it itself",
        ),
    ],
)
def test_what_no_such_cluster_could_hold_is_refused_with_its_settings(config, said):
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert said in str(caught.value)


# ── whatever is asked for ──

SHARES = st.sampled_from([0.1, 0.25, 1 / 3, 0.4, 0.5, 0.6, 1.0])


@st.composite
def runs(draw):
    """A configuration, nodes that may or may not hold it, and on what servers and trainer run."""
    over = draw(st.integers(1, 6))
    config = changed(
        GSM8K,
        sglang__n_servers=draw(st.integers(1, 6)),
        sglang__tp_size=over,
        sglang__dp_size=draw(st.integers(1, 2)) if over < 3 else 1,
        sglang__num_cpus=draw(st.sampled_from([0.0, 1.0, 2.5])),
        actor__dp_size=draw(st.integers(1, 9)),
        actor__num_cpus=draw(st.sampled_from([0.0, 1.0, 4.0])),
        actor__gpu_fraction=draw(SHARES),
        cluster__placement=draw(st.sampled_from(["PACK", "SPREAD"])),
    )
    whole = config.sglang.tp_size * config.sglang.dp_size > 1
    config.sglang.gpu_fraction = 1.0 if whole else draw(SHARES)
    on = [
        NodeResources(
            name=f"n{number}", gpus=draw(st.integers(0, 8)), cpus=draw(st.sampled_from([3.0, 16.0, math.inf]))
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    return config, on, draw(st.sampled_from(["cuda", "cpu"])), draw(st.sampled_from(["cuda", "cpu"]))


def expected(config):
    servers = {f"server-{index}" for index in range(config.sglang.n_servers)}
    ranks = {"trainer", *(f"trainer-{rank}" for rank in range(1, config.actor.dp_size))}
    return servers | ranks


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(runs())
def test_whatever_is_placed_is_placed_once_and_fits(run):
    config, on, servers_on, trainer_on = run
    found = place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=on)
    again = place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=on)
    assert found.bundles == again.bundles, "the same each time"
    assert {one.name for one in found.processes} == expected(config)
    assert len(found.processes) == len(expected(config)), "each once"
    ranks = [(one.node, gpu) for one in found.processes if one.kind == RANK for gpu in one.gpus]
    assert len(set(ranks)) == len(ranks)
    for index in range(config.sglang.n_servers):
        (server,) = (one for one in found.processes if one.name == f"server-{index}")
        assert len(server.gpus) == (0 if servers_on == "cpu" else config.sglang.tp_size * config.sglang.dp_size)
    for bundle in found.bundles:
        assert len({one.node for one in bundle.processes}) == 1
        assert bundle.gpus == len({gpu for one in bundle.processes for gpu in one.gpus})
    if found.shortage is not None:
        return
    booked: dict[tuple[int, int], float] = {}
    for one in found.processes:
        assert len(one.gpus) == one.n_gpus == len(set(one.gpus))
        for gpu in one.gpus:
            assert 0 <= gpu < on[one.node].gpus
            booked[one.node, gpu] = booked.get((one.node, gpu), 0.0) + one.share
    assert all(share <= 1 + 1e-6 for share in booked.values())
    for number, node in enumerate(on):
        assert sum(one.cpus for one in found.processes if one.node == number) <= node.cpus + 1e-6


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(runs())
def test_what_a_run_needs_is_enough_for_it(run):
    config, *_ = run
    enough = [NodeResources(name="n", gpus=gpus_needed(config), cpus=math.inf)]
    assert place(config, nodes=enough).shortage is None
