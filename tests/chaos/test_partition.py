"""A network that is cut in two: nobody steps on both sides, and the run goes on. Two network namespaces; needs root.

    side A    head, Coordinator, HealthMonitor, both servers, and room for a trainer
    side B    the trainer

`cluster.lease_s` is 15 s and Ray declares the node lost after 7.5 s: a cut of 1.5 s costs nothing, one of 20 s the
trainer's life, and after one of 75 s Ray on side B has given up its cluster altogether. Both kinds in one run, whose
nodes and actors take longer to start than a cut lasts.
"""

import time

import pytest

from actors.processes.process_tree import Process, identify
from tests.programs.supervised_run import SupervisedRun
from tests.support.clusters.network_cut import TwoNetworks, is_possible
from tests.support.clusters.raylets import Raylets

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root"),
]


@pytest.fixture
def split(tmp_path):
    """A run whose trainer is alone on side B, once it has stepped."""
    runs = tmp_path / "run"
    runs.mkdir()
    with (
        TwoNetworks() as networks,
        Raylets(tmp_path, prefix=networks.enter(0), ip=networks.ip(0), head_cpus=1) as cluster,
    ):
        cluster.add(cpus=1, name="server")
        cluster.add(cpus=2, name="far", prefix=networks.enter(1), ip=networks.ip(1))
        settings = [f"cluster.address={cluster.address}", "actor.num_cpus=2"]
        with SupervisedRun(
            runs,
            steps=900,
            servers=2,
            settings=settings,
            environment=cluster.environment,
            prefix=networks.enter(0),
        ) as run:
            run.wait_steps(3)
            cluster.add(cpus=2, name="spare")
            yield networks, run


def gone_at(process: Process, deadline_s: float) -> float:
    """When it ended, as seen here; fails where it did not."""
    give_up_at = time.monotonic() + deadline_s
    while identify(process.pid) == process:
        assert time.monotonic() < give_up_at, "it lives behind the partition"
        time.sleep(0.05)
    return time.time()


@pytest.mark.parametrize(
    "seconds", [20.0, pytest.param(30.0, marks=pytest.mark.long), pytest.param(75.0, marks=pytest.mark.long)]
)
def test_a_short_cut_costs_nobody_his_life_and_a_trainer_cut_off_ends_itself_before_another_steps(split, seconds):
    networks, run = split
    trainer, steps = run.trainer_pids(), run.steps_done()
    with networks.cut():
        time.sleep(1.5)
    run.wait_steps(steps + 5)
    assert run.trainer_pids() == trainer
    assert not run.events("node.lost")

    old = identify(run.trainer_pids()[-1])
    assert old is not None
    servers = run.server_pids()
    with networks.cut():
        cut_at = time.time()
        ended_at = gone_at(old, 60.0)
        steps = run.steps_done()
        time.sleep(max(0.0, cut_at + seconds - time.time()))
    run.wait_until(lambda: len(run.trainer_pids()) > 1, "another trainer")
    run.wait_steps(steps + 5)
    lost = run.events("node.lost")[0]
    assert len({event["node"] for event in run.events("node.lost")}) == 1
    begun = run.events("trainer.restored")[1]["time"]
    print(
        f"cut of {seconds:g} s: lost after {lost['time'] - cut_at:.1f} s, the old trainer ended after "
        f"{ended_at - cut_at:.1f} s, another was restored after {begun - cut_at:.1f} s",
        flush=True,
    )
    assert ended_at < begun, "one holder of the trainer's place at a time"
    stepped = [line for line in run.ledger() if line["global_step"] >= steps]
    assert all(len(line["weight_versions"]) == 1 for line in stepped)
    assert run.server_pids() == servers, "who was not cut off is not touched"
    run.stop()
    run.check_ledger()
