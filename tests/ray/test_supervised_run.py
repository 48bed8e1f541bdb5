"""Who is killed, what must go on, and what people get to know of it: real driver, Coordinator and trainer, stand-in
servers. One run for all tests here, in their order, since the start of each costs more than what is done to it."""

import contextlib
import json
import os
import re
import signal

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.worlds.alerts import deadline_s, webhook

pytestmark = pytest.mark.timeout(600)

KILLED_MEANWHILE = re.compile("ended before it answered|is not there to be given anything")
"""Why an order to load weights fails of a server that a test has killed."""


@pytest.fixture(scope="module")
def told():
    """A webhook's url, and what it got."""
    with contextlib.contextmanager(webhook.__wrapped__)() as (url, got, _):
        yield url, got


@pytest.fixture(scope="module")
def run(told, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("run"), ["restart.cluster=0"]
    with SupervisedRun(folder, steps=2000, servers=2, webhook=told[0], settings=settings) as run:
        run.wait_until(lambda: len(run.server_pids()) == 2, "both serve")
        yield run


def record_of(run, number):
    file = run.paths.incident(number) / "incident.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_a_crash_and_a_hang_are_told_once_each_though_the_coordinator_is_killed_meanwhile(run, told):
    first = run.server_pids()
    run.kill(first["server-1"])
    run.wait_until(lambda: run.events("incident.began", "server-1"), "it has begun")
    run.kill(run.coordinator_pids()[-1])
    run.wait_until(lambda: run.events("incident.ended", "server-1"), "it has ended")
    assert run.server_pids()["server-0"] == first["server-0"]
    os.kill(first["server-0"], signal.SIGSTOP)
    run.wait_until(lambda: run.events("incident.ended", "server-0"), "the hang has ended")
    assert run.incidents() == {
        1: ("server_crash", "server-1", True),
        2: ("server_hang", "server-0", True),
    }
    messages = [told[1].get(timeout=deadline_s()) for _ in range(4)]
    assert sorted((m["incident"], m["state"]) for m in messages) == [
        (number, state) for number in (1, 2) for state in ("began", "ended")
    ]
    for died in run.events("server.died"):
        assert died["incident"] == 1
    for number, subject in ((1, "server-1"), (2, "server-0")):
        run.wait_until(lambda n=number: record_of(run, n).get("is_mended") is not None, "its end is written down too")
        incident = record_of(run, number)
        assert (incident["subject"], incident["is_mended"]) == (subject, True)
        assert any(action.startswith(f"{subject}: server.ready") for action in incident["actions"])
        assert {event["incident"] for event in run.events("server.restarting", subject)} == {number}
        assert (run.paths.incident(number) / f"{subject}.log.tail").exists()
    # Of the first, the Coordinator that ordered the restart may have been killed before it was done.
    assert any(action.startswith("server-0: server.restarted") for action in incident["actions"])
    assert (run.paths.incident(2) / "stacks" / "server-0.txt").stat().st_size
    lines = [line for line in run.said().splitlines() if "incident " in line]
    assert [("incident 1: server-1 crashed" in lines[0]), ("incident 1 is over after" in lines[1])] == [True, True]


def test_servers_and_supervisors_are_killed_and_the_trainer_is_not_touched(run):
    run.wait_steps(run.steps_done() + 1)
    servers, dead = run.server_pids(), [event["pid"] for event in run.events("server.died")]
    coordinators, monitors = run.coordinator_pids(), run.monitor_pids()
    run.kill(coordinators[-1])
    run.wait_until(lambda: len(run.coordinator_pids()) > len(coordinators), "the Coordinator is back")
    run.wait_steps(run.steps_done() + 2)
    run.kill(monitors[-1])
    run.wait_until(lambda: len(run.monitor_pids()) > len(monitors), "the HealthMonitor is back")
    run.wait_steps(run.steps_done() + 2)
    assert run.server_pids() == servers, "who watches may die without anybody else dying of it"

    run.kill(*servers.values())
    run.wait_until(lambda: not set(run.server_pids().values()) & set(servers.values()), "both are replaced")
    run.wait_until(lambda: all(is_over for _, _, is_over in run.incidents().values()), "all is mended")
    assert len(run.trainer_pids()) == 1
    died = [event["pid"] for event in run.events("server.died")]
    assert sorted(died) == sorted([*dead, *servers.values()])


def test_without_its_raylet_and_a_new_cluster_it_ends_in_a_word_and_leaves_nobody(run, told):
    incidents = run.incidents()
    messages = [told[1].get(timeout=deadline_s()) for _ in range(2 * (len(incidents) - 2))]
    assert sorted((m["incident"], m["state"]) for m in messages) == [
        (number, state) for number in range(3, len(incidents) + 1) for state in ("began", "ended")
    ]
    run.lose_ray("raylet")
    said = run.said()
    assert "A worker died or was killed" not in said, "Ray's own words are in ray.log"
    assert "all repaired: " in said
    assert told[1].empty()
    failed = [event["reason"] for event in run.events("server.loading_failed")]
    assert not [reason for reason in failed if not KILLED_MEANWHILE.search(reason)], (
        "weights that are ordered are those of the moment of sending, and stay until the server has them"
    )
    run.steps = run.steps_done()
    run.check_ledger(was_killed=True)
    assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "no step was taken twice"
