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
    run.kill(pid_of(run, "server-0", "server.ready"))
    run.wait_until(lambda: run.events("server.promoted", "server-1"), "it was promoted")
    run.wait_steps(run.steps_done() + 3)
    wait_parked(run, "server-0", 1)
    run.wait_until(lambda: run.incidents().get(1, (0, 0, None))[2], "the incident is over")
    promoted, ended = run.events("server.promoted")[0], run.events("incident.ended")[0]
    assert (promoted["replaces"], promoted["incident"]) == ("server-0", 1)
    assert promoted["recovered_after_s"] < pid_parked_after(run, "server-0", promoted)
    assert ended["reason"].startswith("server-1, which stood by, has its place")
    assert [e["rung"] for e in run.events("repair.begun", "server-0") if e["cause"] == "server_crash"] == ["standby"]
    assert len(run.trainer_pids()) == 1


def pid_parked_after(run, name, since):
    return run.events("server.parked", name)[-1]["monotonic"] - since["monotonic"] + since["recovered_after_s"]


def test_a_standby_that_is_killed_is_replaced_without_an_incident(run):
    incidents = run.incidents()
    run.kill(pid_of(run, "server-0", "server.parked"))
    wait_parked(run, "server-0", 2)
    assert run.incidents() == incidents


def test_a_standby_that_hangs_is_not_promoted(run):
    """It stops in the same moment in which the server dies: nobody can have seen it yet."""
    hung = pid_of(run, "server-0", "server.parked")
    os.kill(hung, signal.SIGSTOP)
    run.kill(pid_of(run, "server-1", "server.promoted"))
    steps = run.steps_done()
    run.wait_until(lambda: run.events("server.ready", "server-1"), "the killed one is back by its own restart")
    run.wait_steps(steps + 3)
    assert run.events("server.promoted", "server-0") == []


def test_a_coordinator_that_is_killed_with_the_server_is_followed_by_one_that_promotes(run):
    run.wait_until(lambda: len(run.events("server.parked", "server-0")) >= 3, "the hung one was replaced")
    run.kill(run.coordinator_pids()[-1], pid_of(run, "server-1", "server.ready"))
    steps = run.steps_done()
    run.wait_until(lambda: run.events("server.promoted", "server-0"), "promoted by the successor")
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
