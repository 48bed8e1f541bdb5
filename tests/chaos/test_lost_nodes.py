"""Each worker node of a cluster is lost in turn, at a random moment: the run finishes, and nothing is lost or doubled.

Four raylets on this machine, a head without CPUs and three nodes: two servers (stand-ins) and the trainer lie on one
each, with two trainer ranks two of the four on each of two. Coordinator and HealthMonitor lie wherever Ray puts them.
A lost node is replaced, as an operator would.
"""

import random

import pytest

from launcher.journal import read_lines
from launcher.run_requests import Request, Wish, ask
from tests.raylets import Raylets
from tests.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(1800)

STEPS = {1: 450, 2: 250}


def lost_nodes(run) -> set[str]:
    return {event["node"] for event in run.events("node.lost")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_worker_node_is_lost_in_turn_and_the_run_finishes(tmp_path, ranks):
    draw = random.Random(5)
    runs = tmp_path / "run"
    runs.mkdir()
    with Raylets(tmp_path) as cluster:
        for index in range(3):
            cluster.add(cpus=ranks, name=f"worker-{index}")
        settings = [f"cluster.address={cluster.address}"]
        with SupervisedRun(
            runs, steps=STEPS[ranks], servers=2, ranks=ranks, settings=settings, environment=cluster.environment
        ) as run:
            run.wait_steps(3)
            for number, victim in enumerate(list(cluster.nodes), 1):
                run.wait_steps(run.steps_done() + draw.randrange(2, 8))
                killed_at = cluster.kill(victim)
                run.wait_until(lambda n=number: len(lost_nodes(run)) == n, "the loss is seen")
                lost = run.events("node.lost")[-1]
                print(f"{victim.name} held {lost['held']}, lost after {lost['time'] - killed_at:.1f} s", flush=True)
                ask(run.paths, Request(wish=Wish.PAUSE, by="the test", reason="a node takes its time to start"))
                cluster.add(cpus=ranks, name=f"{victim.name}-again")
                ask(run.paths, Request(wish=Wish.RUN, by="the test"))
                run.wait_until(lambda: set(run.ready_now()) == {"server-0", "server-1"}, "both servers serve")
                run.wait_steps(run.steps_done() + 3)
            lives = {name: len(run.events("server.starting", name)) for name in ("server-0", "server-1")}
            assert ranks > 1 or lives == {"server-0": 2, "server-1": 2}, "each was lost once, and begun anew elsewhere"
            assert len(run.trainer_pids()) > 1
            said = run.finish()
        run.check_ledger()
        words = [event["event"] for event in read_lines(run.paths.events) if event["event"] == "run.finished"]
        assert words == ["run.finished"], said
        run.wait_gone()
