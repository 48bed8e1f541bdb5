"""Runs on a cluster of two nodes: Ray books what was planned, all of it or nothing, and says what is short."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.machine import scaled


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    """What came of each run of tests/programs/two_nodes.py."""
    folder = tmp_path_factory.mktemp("two_nodes")
    command = [sys.executable, "-m", "tests.programs.two_nodes", str(folder / "keys")]
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(400), check=False, env=quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def on(run, kind):
    return {node for name, node in run["nodes"].items() if name.startswith(kind)}


def test_servers_and_ranks_apart_as_the_plan_has_them(came):
    run = came["separate"]
    assert len(on(run, "server")) == len(on(run, "trainer")) == 1
    assert on(run, "server") != on(run, "trainer")
    assert not run["shares_gpu"]
    assert run["ranks"] == ["nameless"] * 7
    trainer, rank, first, last = (run["at"][name] for name in ("trainer", "trainer-1", "server-0", "server-7"))
    assert trainer["node"] == rank["node"] != first["node"] == last["node"]
    assert all(len(at["gpus"]) == 1 for at in run["at"].values())
    assert trainer["gpus"] != rank["gpus"]
    assert first["gpus"] != last["gpus"]


def test_who_is_planned_on_one_gpu_gets_one_gpu(came):
    run = came["colocated"]
    assert run["shares_gpu"]
    for server, rank in (("server-0", "trainer"), ("server-1", "trainer-1")):
        assert run["at"][server] == run["at"][rank]
    assert run["at"]["server-0"] != run["at"]["server-1"]


def test_spread_over_both_nodes(came):
    run = came["spread"]
    assert len(on(run, "")) == 2


def test_a_killed_actor_comes_back_into_its_bundle(came):
    assert came["killed"]["before"]["node"] == came["killed"]["after"]["node"]
    assert len(came["killed"]["after"]["gpus"]) == 1


def test_what_another_run_holds_is_waited_for_and_refused_with_what_is_free(came):
    said = came["held"]["said"]
    assert said.startswith(
        "Ray has not placed the run within cluster.placement_timeout=2 s (NO_RESOURCES): 16 GPUs and "
    )
    assert said.endswith("; 2 nodes with 16 GPUs and 384 CPUs in all, 0 GPUs and 256 CPUs free")
    assert came["held"]["hint"].startswith("end what holds it (`ray status`), or lower sglang.n_servers")


@pytest.mark.parametrize(
    ("run", "word", "asked"),
    [
        (
            "too_large",
            "NO_RESOURCES",
            "18 GPUs and 144 CPUs are asked for: 10 × 1 GPU and 8 CPUs (1 trainer rank)",
        ),
        ("larger_than_a_node", "INFEASIBLE", "24 GPUs and 72 CPUs are asked for: 16 GPUs and 8 CPUs (1 server), "),
    ],
)
def test_what_the_cluster_can_not_hold_is_refused_by_what_ray_says_without_a_wait(came, run, word, asked):
    assert came[run]["said"].startswith(f"Ray has not placed the run ({word}): {asked}")
    assert came[run]["said"].endswith("; 2 nodes with 16 GPUs and 384 CPUs in all, 16 GPUs and 384 CPUs free")


def test_too_few_nodes_are_refused(came):
    assert "cluster.n_nodes=3: the cluster has 2" in came["too_few"]["said"]
    assert "with 8 GPUs and 192 CPUs" in came["too_few"]["said"]
