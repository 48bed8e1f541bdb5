"""A parked trainer takes over from one that is killed, again and again, whatever befalls it meanwhile; the ledger is
whole and nobody stays. Real driver, Coordinator, trainers, with LoRA, which needs packages that a trainer without it
does not import; stand-in servers."""

import os
import signal

import psutil
import pytest

from scripts.run_processes import find_run
from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import kill_command
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(900)

KILLS = 5
"""At most, until two were followed by a takeover: one that does not answer in time is left for a cold start."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = ("recovery.standby_trainers=1", f"health.supervisor_silence_s={scaled(6.0):.0f}", "actor.use_lora=true")
    with SupervisedRun(tmp_path_factory.mktemp("run"), steps=3000, servers=1, settings=settings) as run:
        run.wait_until(lambda: run.events("trainer.parked"), "one is parked")
        yield run


def parked(run):
    """The process of the one that waits, as soon as there is one."""

    def waits():
        pid = run.events("trainer.parked")[-1]["pid"]
        return pid != run.trainer_pids()[-1] and psutil.pid_exists(pid) and is_not_stopped(pid)

    run.wait_until(waits, "one is parked")
    return run.events("trainer.parked")[-1]["pid"]


def is_not_stopped(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def kill_the_trainer(run):
    """Until the run steps again; whether the parked one took over, and the trainer's process before."""
    taken, trainer = len(run.events("trainer.took_over")), find_run(run.paths).trainer.pid
    steps = run.steps_done()
    run.kill(trainer)
    run.wait_steps(steps + 2)
    return len(run.events("trainer.took_over")) > taken, trainer


def test_the_parked_one_takes_over_twice_and_the_first_process_is_parked_again(run):
    takeovers, kills = 0, 0
    while takeovers < 2:
        assert kills < KILLS, run.tail()
        waiting = parked(run)
        assert find_run(run.paths).standby_trainer.pid == waiting
        took_over, before = kill_the_trainer(run)
        kills, takeovers = kills + 1, takeovers + took_over
        assert run.trainer_pids()[-1] != before
        assert (run.trainer_pids()[-1] == waiting) == took_over, "else it starts cold"
    assert [event["actor"] for event in run.events("trainer.took_over")] == ["trainer-standby", "trainer"]


@pytest.mark.long
def test_one_that_is_killed_or_stopped_while_it_waits_is_replaced_and_costs_no_step(run):
    for how in (signal.SIGKILL, signal.SIGSTOP):
        waiting, ended = parked(run), len(run.events("trainer.died"))
        parks = len(run.events("trainer.parked"))
        os.kill(waiting, how)
        run.wait_until(lambda parks=parks: len(run.events("trainer.parked")) > parks, "another one is parked")
        assert len(run.events("trainer.died")) == ended, "the trainer is not touched"
        assert not psutil.pid_exists(waiting)


@pytest.mark.long
def test_one_that_is_stopped_does_not_hold_up_a_cold_start(run):
    waiting, trainer = parked(run), find_run(run.paths).trainer.pid
    starts, steps = len(run.events("trainer.took_over")), run.steps_done()
    os.kill(waiting, signal.SIGSTOP)
    run.kill(trainer)
    run.wait_steps(steps + 2)
    assert len(run.events("trainer.took_over")) == starts


@pytest.mark.long
def test_a_coordinator_that_is_restarted_adopts_the_trainer_and_one_is_parked_again(run):
    parked(run)
    coordinators, trainers = len(run.coordinator_pids()), run.trainer_pids()
    run.kill(run.coordinator_pids()[-1])
    run.wait_until(lambda: len(run.coordinator_pids()) > coordinators, "the Coordinator is back")
    run.wait_steps(run.steps_done() + 2)
    assert run.trainer_pids() == trainers, "the trainer was adopted"
    parked(run)
    assert kill_the_trainer(run)[0], "it takes over"


def test_nobody_outlives_the_driver_and_no_step_is_lost_or_taken_twice(run):
    kill_command(run.process.pid)
    run.process.wait()
    run.wait_gone()
    run.steps = run.steps_done()
    run.check_ledger(was_killed=True)
    assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "no step was taken twice"
