"""Weights over a group (xccl) to the real SGLang on another node than the trainer: two network namespaces; root."""

import json
from pathlib import Path

import pytest

from launcher.run_files.journal import read_lines
from tests.programs.supervised_run import REAL_SERVERS, SupervisedRun
from tests.support.clusters.network_cut import TwoNetworks, is_possible
from tests.support.clusters.raylets import Raylets

STEPS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root"),
]


def network(pid):
    return Path(f"/proc/{pid}/ns/net").readlink()


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_whole_run_whose_trainer_and_server_are_on_two_nodes(tmp_path, servers):
    """Of two servers one is beside the trainer."""
    runs = tmp_path / "run"
    runs.mkdir()
    with (
        TwoNetworks() as networks,
        Raylets(tmp_path, prefix=networks.enter(0), ip=networks.ip(0), **{REAL_SERVERS: "1"}) as cluster,
    ):
        cluster.add(cpus=1, name="server")
        cluster.add(cpus=1 + servers, name="trainer", prefix=networks.enter(1), ip=networks.ip(1))
        settings = [f"cluster.address={cluster.address}", "cluster.n_nodes=2", "actor.num_cpus=2"]
        settings += ["actor.weight_update_mode=xccl", "rollout.setup_timeout=600"]
        with SupervisedRun(
            runs,
            steps=STEPS,
            servers=servers,
            settings=settings,
            environment=cluster.environment,
            prefix=networks.enter(0),
        ) as run:
            run.wait_steps(2)
            apart = [pid for pid in run.server_pids().values() if network(pid) != network(run.trainer_pids()[-1])]
            assert len(apart) == 1
            said = run.finish()
        run.check_ledger()
        assert [event["event"] for event in run.events("run.finished")] == ["run.finished"], said
        assert run.events("weights.by_files") == [], "none through files"
        for index in range(servers):
            lines = run.paths.server_log(index).read_text().splitlines()
            (group,) = [line for line in lines if "init custom process group" in line]
            assert f"master_address={networks.ip(1)}" in group
        for line in read_lines(run.paths.metrics):
            print(json.dumps({key: value for key, value in line.items() if "publish" in key or "distance" in key}))
