"""Two servers that both serve: when one is lost, its completions go on at the other, whoever else is lost with it. One
run for all tests here, in their order; the servers are stand-ins."""

import os
import signal

import pytest

from tests.programs.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)

BOTH = ["server-0", "server-1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with SupervisedRun(tmp_path_factory.mktemp("run"), steps=5000, servers=2) as run:
        yield run


def lives(run, name):
    return len(run.events("server.ready", name))


def wait_both(run):
    """Both serve, and every incident is over."""
    run.wait_until(lambda: sorted(run.ready_now()) == BOTH, "both serve")
    run.wait_until(lambda: all(mended for _, _, mended in run.incidents().values()), "it is over")


def steps_go_on(run, steps=3):
    run.wait_steps(run.steps_done() + steps)


def test_both_have_traffic(run):
    wait_both(run)
    steps_go_on(run)
    assert sorted({event["subject"] for event in run.events("server.ready")}) == BOTH


@pytest.mark.parametrize("name", BOTH)
def test_when_one_is_killed_no_rollout_fails_and_it_comes_back(run, name):
    """The first of the two may be lost as the second: nobody is the one that matters."""
    other = BOTH[1 - BOTH.index(name)]
    before, others, first = lives(run, name), lives(run, other), len(run.ledger())
    run.kill(run.server_pids()[name])
    run.wait_until(lambda: lives(run, name) > before, "it serves again")
    steps_go_on(run)
    wait_both(run)
    assert lives(run, other) == others, "the other one is not restarted for it"
    assert sum(line["rollouts_failed"] for line in run.ledger()[first:]) == 0
    (cause, subject, _) = run.incidents()[len(run.incidents())]
    assert (cause, subject) == ("server_crash", name)
    assert len(run.trainer_pids()) == 1


def test_one_that_hangs_in_the_moment_in_which_the_other_is_killed_is_no_help_and_both_start_anew(run):
    """Nobody can have seen the hang yet."""
    pids, before = run.server_pids(), {name: lives(run, name) for name in BOTH}
    os.kill(pids["server-0"], signal.SIGSTOP)
    run.kill(pids["server-1"])
    run.wait_until(lambda: all(lives(run, name) > before[name] for name in BOTH), "both serve again")
    steps_go_on(run)
    wait_both(run)
    assert not set(pids.values()) & set(run.server_pids().values())


def test_a_coordinator_that_is_killed_with_a_server_is_followed_by_one_that_restarts_it(run):
    before, others = lives(run, "server-1"), lives(run, "server-0")
    run.kill(run.coordinator_pids()[-1], run.server_pids()["server-1"])
    run.wait_until(lambda: lives(run, "server-1") > before, "the successor brings it back")
    steps_go_on(run)
    wait_both(run)
    assert lives(run, "server-0") == others, "what is healthy is adopted"


def test_ctrl_c_saves_and_nothing_was_lost_or_stale_and_nobody_stays(run):
    """It reaches the driver through its parent."""
    assert "stopping: the step under way is finished and saved" in run.stop()
    (aborted,) = run.events("run.aborted")
    assert aborted["reason"] == "ended by the user"
    run.wait_gone()
    run.check_ledger()
