"""Who works on and who watches changes while a run goes on: servers come and leave, and a supervisor that is stopped,
and so is alive to Ray and answers nobody, is replaced. One run for all tests here, in their order."""

import os
import signal

import pytest

from scripts import run_control
from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    silence = f"health.supervisor_silence_s={max(scaled(15.0), 30.0):.0f}"  # the load may rise after this
    with SupervisedRun(tmp_path_factory.mktemp("run"), steps=2000, servers=1, settings=[silence]) as run:
        run.wait_steps(2)
        yield run


def scale(run, *words):
    of = run.paths
    names = ["--experiment-name", of.experiment_name, "--fileroot", str(of.fileroot), "--user", of.user]
    return run_control.main(["scale", *words, *names, "--timeout", "300"])


def test_a_server_comes_leaves_and_comes_again_and_no_prompt_notices(run):
    assert scale(run, "--servers", "2") == 0
    run.kill(run.coordinator_pids()[-1])
    run.wait_until(lambda: run.events("coordinator.adopted"), "the Coordinator is back")
    run.wait_steps(run.steps_done() + 2)
    assert scale(run, "--servers", "1") == 0
    assert run.events("server.left", "server-1")
    run.wait_steps(run.steps_done() + 2)
    assert scale(run, "--servers", "2") == 0
    run.wait_steps(run.steps_done() + 3)
    assert sum(line["rollouts_failed"] + line["rollouts_retried"] for line in run.ledger()) == 0
    assert run.events("server.died") == run.events("incident.began") == []
    started = [event["subject"] for event in run.events("server.starting")]
    assert started == ["server-0", "server-1", "server-1"], "who came was adopted"


def test_a_stopped_monitor_is_replaced_and_nobody_else(run):
    servers = run.server_pids()
    os.kill(run.monitor_pids()[-1], signal.SIGSTOP)
    run.wait_until(lambda: len(run.monitor_pids()) == 2, "the HealthMonitor is replaced")
    run.wait_steps(run.steps_done() + 2)
    assert run.server_pids() == servers
    assert len(run.events("monitor.hung")) == 1
    assert run.events("batch.rejected") == []


def test_a_stopped_coordinator_is_replaced_and_a_server_that_died_meanwhile_too(run):
    adopted = len(run.events("coordinator.adopted"))
    os.kill(run.coordinator_pids()[-1], signal.SIGSTOP)
    run.kill(run.server_pids()["server-1"])
    run.wait_until(lambda: len(run.events("coordinator.adopted")) > adopted, "the Coordinator is replaced")
    run.wait_steps(run.steps_done() + 2)
    assert len(run.events("coordinator.hung")) == 1


def test_sigterm_saves_and_says_its_word_as_ctrl_c_does(run):
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(scaled(120))
    assert run.process.returncode == 130, run.said()
    assert len(run.events("run.aborted")) == 1
    run.wait_gone()
    run.steps = run.steps_done()
    run.check_ledger()
    assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "no step was taken twice"
    assert len(run.trainer_pids()) == 1
