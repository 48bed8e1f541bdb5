"""Who gets which GPU of which node, what is said where there is no room, and what holds whatever is asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.errors import ConfigError, ResourceError
from launcher.config.compose import compose
from launcher.resources.capacity import RANK, NodeResources
from launcher.resources.config_checks import check
from launcher.resources.placement import bundles, gpus_needed, gpus_of, place
from tests.support.preflight_parts import ARITHMETIC, changed

GSM8K = compose(["conf=gsm8k_h200"])
CLUSTER = compose(["conf=gsm8k_h200_cluster"])


def alone(**keys):
    """Servers and ranks that book whole GPUs."""
    return changed(GSM8K, **{"sglang__gpu_fraction": 1.0, "actor__gpu_fraction": 1.0, **keys})


def nodes(*gpus, cpus=100.0):
    return [NodeResources(name=f"node {number}", gpus=count, cpus=cpus) for number, count in enumerate(gpus)]


def placements(config, on, device="cuda"):
    return place(config, servers_on=device, trainer_on=device, nodes=on)


def where(config, on):
    return {one.name: (one.node, one.gpus) for one in placements(config, on)}


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
    assert where(config, nodes(4, 8))["server-0"] == (1, tuple(range(8)))
    with pytest.raises(ResourceError, match="server-0 needs 8 GPUs on one node"):
        placements(config, nodes(4, 4, 4))


def test_ranks_stay_on_one_node_where_one_holds_them_all():
    assert {one.node for one in placements(alone(actor__dp_size=4), nodes(2, 4)) if one.kind == RANK} == {1}
    spread = [one.node for one in placements(alone(actor__dp_size=5), nodes(2, 4)) if one.kind == RANK]
    assert sorted(spread) == [0, 1, 1, 1, 1]


def test_spread_uses_every_node():
    config = changed(ARITHMETIC, cluster__placement="SPREAD", sglang__n_servers=2, actor__dp_size=2)
    found = placements(config, nodes(0, 0, 0, 0), device="cpu")
    assert sorted(one.node for one in found) == [0, 1, 2, 3]
    assert len(bundles(found, strategy="SPREAD")) == 4


def test_cpus_bound_what_a_node_holds():
    config = changed(ARITHMETIC, sglang__n_servers=3, sglang__num_cpus=2.0)
    assert [one.node for one in placements(config, nodes(0, 0, cpus=4), device="cpu")] == [0, 0, 1, 1]


# ── bundles ──


def test_ranks_of_a_node_are_one_bundle_and_each_server_is_its_own():
    booked = bundles(placements(CLUSTER, nodes(8, 8)), strategy="PACK")
    assert sorted(len(bundle.names) for bundle in booked) == [1] * 8 + [8]
    (ranks,) = (bundle for bundle in booked if len(bundle.names) == 8)
    assert ranks.resources == {"GPU": 8.0, "CPU": 64.0}


def test_who_shares_a_gpu_shares_its_bundle():
    (bundle,) = bundles(placements(GSM8K, nodes(1)), strategy="PACK")
    assert bundle.names == ("server-0", "trainer")
    assert bundle.resources == {"GPU": 1.0, "CPU": 2.0}


def test_a_bundle_is_never_empty():
    config = changed(ARITHMETIC, sglang__num_cpus=0.0, actor__num_cpus=0.0)
    assert all(bundle.resources for bundle in bundles(placements(config, nodes(0), device="cpu"), strategy="PACK"))


# ── what can't be ──


@pytest.mark.parametrize(
    ("config", "on", "said", "key"),
    [
        (
            alone(actor__dp_size=8, sglang__n_servers=9),
            nodes(8, 8),
            "GPUs: 17 are needed and 16 found; server-8 needs 1 GPU: node 0 has 0 of 8 GPUs free, node 1 has 0 of 8 "
            "GPUs free: 1 GPU short on node 0",
            "sglang.n_servers",
        ),
        (
            alone(sglang__tp_size=8),
            nodes(4),
            "GPUs: 9 are needed and 4 found; server-0 needs 8 GPUs on one node: node 0 has 4 of 4",
            "sglang.tp_size",
        ),
        (
            alone(sglang__tp_size=4, sglang__n_servers=2, actor__dp_size=5),
            nodes(8, 6),
            "GPUs: 13 are needed and 14 found; server-1 needs 4 GPUs on one node: node 0 has 3 of 8 GPUs free, node 1 "
            "has 2 of 6 GPUs free: 1 GPU short on node 0, which has the most",
            "sglang.tp_size",
        ),
        (alone(actor__dp_size=4), nodes(4), "GPUs: 5 are needed and 4 found; server-0 needs 1 GPU", "sglang.n_servers"),
        (
            alone(sglang__tp_size=4, actor__dp_size=2),
            nodes(5),
            "GPUs: 6 are needed and 5 found; trainer-1 needs 1 GPU: node 0 has 0 of 5 GPUs free: 1 GPU short on node 0",
            "actor.dp_size",
        ),
        (
            changed(GSM8K, actor__gpu_fraction=0.6),
            nodes(1),
            "server-0 needs a share of 0.5 of one GPU: node 0 has 0 of 1 GPUs with room for a share of 0.5",
            "sglang.gpu_fraction",
        ),
        (
            changed(GSM8K, actor__dp_size=3),
            nodes(2),
            "trainer-2 needs a share of 0.5 of one GPU without another rank",
            "actor.dp_size",
        ),
        (
            alone(sglang__num_cpus=64.0, sglang__n_servers=2),
            nodes(8, cpus=100),
            "CPUs: 129 are needed and 100 found; server-1 needs 64 CPUs on one node with its GPUs: node 0 has 36 of "
            "100 CPUs free: 28 CPUs short on node 0",
            "sglang.num_cpus",
        ),
        (
            alone(actor__num_cpus=40.0, actor__dp_size=3),
            nodes(8, cpus=100),
            "CPUs: 121 are needed and 100 found; trainer-2 needs 40 CPUs on one node",
            "actor.num_cpus",
        ),
        (alone(), nodes(0), "GPUs: 2 are needed and 0 found", "sglang.n_servers"),
        (alone(), [], "GPUs: 2 are needed and 0 found", "cluster.n_nodes"),
        (alone(), nodes(*[0] * 9), "5 more nodes have no more than that", "cluster.n_nodes"),
    ],
)
def test_what_is_short_where_and_what_to_change(config, on, said, key):
    with pytest.raises(ResourceError) as caught:
        placements(config, on)
    assert said in caught.value.message
    assert key in caught.value.hint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (alone(sglang__tp_size=16, cluster__n_gpus_per_node=8), "sglang.tp_size=16: at most cluster.n_gpus_per_node=8"),
        (
            changed(CLUSTER, sglang__tp_size=32),
            "sglang.tp_size=32: at most cluster.n_gpus_per_node=8 × 2 nodes",
        ),
        (
            changed(CLUSTER, sglang__tp_size=4, sglang__dp_size=8),
            "sglang.dp_size=8: at most cluster.n_gpus_per_node=8 × 2 nodes, with 4 GPUs for each",
        ),
        (
            changed(CLUSTER, actor__dp_size=17),
            "actor.dp_size=17: at most cluster.n_gpus_per_node=8 × 2 nodes: one GPU a rank",
        ),
        (
            changed(CLUSTER, actor__dp_size=9),
            "cluster.n_gpus_per_node=8: 17 GPUs are needed: 8 servers × sglang.gpu_fraction=1 + 9 ranks of the trainer",
        ),
        (
            changed(CLUSTER, sglang__dp_size=2, sglang__gpu_fraction=0.5),
            "sglang.gpu_fraction=0.5: 1 with sglang.tp_size=1 × sglang.dp_size=2",
        ),
        (
            changed(CLUSTER, sglang__tp_size=8, sglang__dp_size=2, sglang__n_servers=1, actor__device="cpu"),
            "server-0 needs 16 GPUs on one node",
        ),
        (changed(CLUSTER, cluster__n_nodes=1), "cluster.n_gpus_per_node=8: 16 GPUs are needed"),
        (
            changed(CLUSTER, sglang__num_cpus=100.0),
            "hardware.n_cpus_per_node=192: CPUs: 864 are needed and 384 found; server-1",
        ),
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
    try:
        found = place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=on)
    except ResourceError as error:
        assert error.hint
        assert "short on" in error.message
        return
    assert found == place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=on), "the same each time"
    assert {one.name for one in found} == expected(config)
    assert len({one.name for one in found}) == len(found), "each once"
    booked: dict[tuple[int, int], float] = {}
    for one in found:
        assert len(one.gpus) == one.n_gpus == len(set(one.gpus))
        for gpu in one.gpus:
            assert 0 <= gpu < on[one.node].gpus
            booked[one.node, gpu] = booked.get((one.node, gpu), 0.0) + one.share
    assert all(share <= 1 + 1e-6 for share in booked.values())
    for number, node in enumerate(on):
        assert sum(one.cpus for one in found if one.node == number) <= node.cpus + 1e-6
    ranks = [(one.node, gpu) for one in found if one.kind == RANK for gpu in one.gpus]
    assert len(set(ranks)) == len(ranks)
    for index in range(config.sglang.n_servers):
        (server,) = (one for one in found if one.name == f"server-{index}")
        gpus = 0 if servers_on == "cpu" else config.sglang.tp_size * config.sglang.dp_size
        assert len(server.gpus) == gpus


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(runs())
def test_every_process_is_in_one_bundle_that_its_node_can_give(run):
    config, on, servers_on, trainer_on = run
    try:
        found = place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=on)
    except ResourceError:
        return
    booked = bundles(found, strategy=config.cluster.placement)
    assert sorted(name for bundle in booked for name in bundle.names) == sorted(one.name for one in found)
    assert sum(bundle.gpus for bundle in booked) == gpus_of(found)
    by_name = {one.name: one for one in found}
    for bundle in booked:
        assert {by_name[name].node for name in bundle.names} == {bundle.node}
        assert bundle.gpus >= sum(len(by_name[name].gpus) * by_name[name].share for name in bundle.names) - 1e-6


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(runs())
def test_what_a_run_needs_is_enough_for_it(run):
    config, _, servers_on, trainer_on = run
    needed = gpus_needed(config, servers_on=servers_on, trainer_on=trainer_on)
    place(
        config,
        servers_on=servers_on,
        trainer_on=trainer_on,
        nodes=[NodeResources(name="n", gpus=needed, cpus=math.inf)],
    )
