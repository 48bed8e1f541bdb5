"""Each worker node of a cluster is lost in turn, at a random moment: the run finishes, and nothing is lost or doubled.

Four raylets on this machine, a head without CPUs and three nodes: two servers (stand-ins) and the trainer lie on one
each, with two trainer ranks two of the four on each of two. Coordinator and HealthMonitor lie wherever Ray puts them.
A lost node is replaced, as an operator would. Without --long it is one node of the three that is lost.
"""

import random

import pytest

from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask
from launcher.run_files.journal import read_lines
from tests.programs.supervised_run import REAL_SERVERS, SupervisedRun
from tests.support.clusters.raylets import Raylets

pytestmark = pytest.mark.timeout(1800)


def lost_nodes(run) -> set[str]:
    return {event["node"] for event in run.events("node.lost")}


@pytest.mark.parametrize(
    ("ranks", "losses", "steps"),
    [(2, 1, 80), pytest.param(2, 3, 250, marks=pytest.mark.long), pytest.param(1, 3, 450, marks=pytest.mark.long)],
)
def test_each_worker_node_is_lost_in_turn_and_the_run_finishes(tmp_path, ranks, losses, steps, request):
    draw = random.Random(5)
    runs = tmp_path / "run"
    runs.mkdir()
    real = {REAL_SERVERS: "1"} if request.config.getoption("--real-servers") else {}
    with Raylets(tmp_path, **real) as cluster:
        for index in range(3):
            cluster.add(cpus=ranks, name=f"worker-{index}")
        settings = [f"cluster.address={cluster.address}"]
        with SupervisedRun(
            runs, steps=steps, servers=2, ranks=ranks, settings=settings, environment=cluster.environment
        ) as run:
            run.wait_steps(3)
            for number, victim in enumerate(cluster.nodes[:losses], 1):
                run.wait_steps(run.steps_done() + draw.randrange(2, 8))
                killed_at = cluster.kill(victim)
                run.wait_until(lambda n=number: len(lost_nodes(run)) == n, "the loss is seen")
                lost = run.events("node.lost")[-1]
                print(f"{victim.name} held {lost['held']}, lost after {lost['time'] - killed_at:.1f} s", flush=True)
                ask(
                    run.paths,
                    RequestEntry(wish=ControlRequest.PAUSE, by="the test", reason="a node takes its time to start"),
                )
                cluster.add(cpus=ranks, name=f"{victim.name}-again")
                ask(run.paths, RequestEntry(wish=ControlRequest.RUN, by="the test"))
                run.wait_until(lambda: set(run.ready_now()) == {"server-0", "server-1"}, "both servers serve")
                run.wait_steps(run.steps_done() + 3)
            lives = {name: len(run.events("server.starting", name)) for name in ("server-0", "server-1")}
            assert ranks > 1 or lives == {"server-0": 2, "server-1": 2}, "each was lost once, and begun anew elsewhere"
            assert losses < 3 or len(run.trainer_pids()) > 1
            said = run.finish()
        run.check_ledger()
        words = [event["event"] for event in read_lines(run.paths.events) if event["event"] == "run.finished"]
        assert words == ["run.finished"], said
        run.wait_gone()
