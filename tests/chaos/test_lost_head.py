"""A cluster's head is lost, without Ray's fault tolerance: the run ends in a word, and goes on on another cluster."""

import pytest

from tests.programs.supervised_run import DEADLINE_S, SupervisedRun
from tests.support.clusters.raylets import Raylets
from tests.support.machine import scaled

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def on(cluster, folder, *, steps):
    settings = [f"cluster.address={cluster.address}"]
    return SupervisedRun(folder, steps=steps, servers=1, settings=settings, environment=cluster.environment)


def test_the_same_command_goes_on_on_another_cluster(tmp_path):
    runs = tmp_path / "run"
    runs.mkdir()
    with Raylets(tmp_path) as cluster:
        cluster.add(cpus=2)
        with on(cluster, runs, steps=900) as run:
            run.wait_steps(4)
            cluster.kill(cluster.head)
            run.process.wait(scaled(DEADLINE_S))
            assert run.process.returncode == 3, run.said()
            assert "the cluster's head has not answered" in run.said()
            run.wait_gone(90.0)
            done = run.steps_done()
            run.check_ledger(is_whole=False)
    with Raylets(tmp_path) as cluster:
        cluster.add(cpus=2)
        with on(cluster, runs, steps=done + 5) as again:
            again.finish()
            again.check_ledger()
            assert [line["global_step"] for line in again.ledger()] == list(range(done + 5)), "no step was taken twice"
