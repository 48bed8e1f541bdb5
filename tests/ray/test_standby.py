"""A standby in a real run: it takes a killed server's place, its own death costs nobody anything, and it leaves nobody
behind. One run for all tests here, in their order; the servers are stand-ins."""

import os
import signal

import pytest

from launcher.run_files.journal import read_lines
from scripts import run_control
from tests.programs.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = ["recovery.standby_servers=1"]
    with SupervisedRun(tmp_path_factory.mktemp("run"), steps=5000, servers=1, settings=settings) as run:
        yield run


OTHER = {"server-0": "server-1", "server-1": "server-0"}


def with_traffic(run):
    """The server that was given traffic last, and its process."""
    given = [e for e in read_lines(run.paths.events) if e["event"] in ("server.ready", "server.promoted")]
    return given[-1]["subject"], given[-1]["pid"]


def pid_of(run, name, event):
    return run.events(event, name)[-1]["pid"]


def wait_parked(run, name, times):
    run.wait_until(lambda: len(run.events("server.parked", name)) == times, f"{name} is parked")


def test_the_standby_is_started_after_the_servers_and_takes_no_traffic(run):
    wait_parked(run, "server-1", 1)
    steps = run.steps_done()
    run.wait_steps(steps + 3)
    order = [e["event"] for e in read_lines(run.paths.events) if e["event"] in ("server.ready", "server.joining")]
    assert order == ["server.ready", "server.joining"]
    assert "server-1" not in run.ready_now()
    assert run.events("server.probing", "server-1") == run.events("server.ready", "server-1") == []


def test_the_standby_takes_the_place_of_a_killed_server_and_that_one_stands_by_next(run):
    run.wait_steps(run.steps_done() + 1)  # no publishing is under way, for which the standby is not waited for
    run.kill(pid_of(run, "server-0", "server.ready"))
    run.wait_until(lambda: run.events("server.promoted", "server-1"), "it was promoted")
    run.wait_steps(run.steps_done() + 3)
    wait_parked(run, "server-0", 1)
    run.wait_until(lambda: run.incidents().get(1, (0, 0, None))[2], "the incident is over")
    promoted, ended = run.events("server.promoted")[0], run.events("incident.ended")[0]
    assert (promoted["replaces"], promoted["incident"]) == ("server-0", 1)
    assert promoted["recovered_after_s"] < pid_parked_after(run, "server-0", promoted)
    assert ended["reason"].startswith("server-1, which stood by, has its place")
    rungs = [e["rung"] for e in run.events("repair.begun", "server-0") if e["cause"] == "server_crash"]
    assert rungs in (["standby"], ["server"]), "the latter where the standby was still loading the newest weights"
    assert len(run.trainer_pids()) == 1


def pid_parked_after(run, name, since):
    return run.events("server.parked", name)[-1]["monotonic"] - since["monotonic"] + since["recovered_after_s"]


def test_a_standby_that_is_killed_is_replaced_without_an_incident(run):
    incidents = run.incidents()
    run.kill(pid_of(run, "server-0", "server.parked"))
    wait_parked(run, "server-0", 2)
    assert run.incidents() == incidents


def test_a_standby_that_hangs_is_not_promoted(run):
    """It stops in the same moment in which the server dies: nobody can have seen it yet.

    Both start anew. Whichever is ready first has the traffic from then on, and the other one stands by.
    """
    hung, killed = pid_of(run, "server-0", "server.parked"), pid_of(run, "server-1", "server.promoted")
    os.kill(hung, signal.SIGSTOP)
    run.kill(killed)
    steps = run.steps_done()
    run.wait_until(
        lambda: run.events("server.ready", "server-1") or run.events("server.promoted", "server-0"), "one serves again"
    )
    run.wait_steps(steps + 3)
    assert hung not in [event["pid"] for event in run.events("server.promoted")]

    def another_stands_by():
        return pid_of(run, OTHER[with_traffic(run)[0]], "server.parked") not in (hung, killed)

    run.wait_until(another_stands_by, "the other one is parked")


def test_a_coordinator_that_is_killed_with_the_server_is_followed_by_one_that_promotes(run):
    run.wait_steps(run.steps_done() + 1)
    serving, pid = with_traffic(run)
    before = len(run.events("server.promoted", OTHER[serving]))
    run.kill(run.coordinator_pids()[-1], pid)
    steps = run.steps_done()
    run.wait_until(
        lambda: len(run.events("server.promoted", OTHER[serving])) > before, "the other is promoted by the successor"
    )
    run.wait_steps(steps + 3)


def test_the_size_of_the_fleet_is_that_of_the_servers_with_traffic(run):
    of = run.paths
    names = ["--experiment-name", of.experiment_name, "--fileroot", str(of.fileroot), "--user", of.user]
    assert run_control.main(["scale", "--servers", "1", *names, "--timeout", "300"]) == 0
    assert run.events("server.left") == run.events("server.join_asked") == []


def test_nothing_was_lost_or_stale_and_nobody_stays(run):
    run.stop()
    run.wait_gone()
    run.check_ledger()
