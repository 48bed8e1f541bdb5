"""A supervisor that is stopped, and so is alive to Ray and answers nobody: it is replaced, and the steps go on."""

import os
import signal

import pytest

from tests.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)


def test_a_stopped_monitor_is_replaced_and_nobody_else(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        servers = run.server_pids()
        os.kill(run.monitor_pids()[-1], signal.SIGSTOP)
        run.wait_until(lambda: len(run.monitor_pids()) == 2, "the HealthMonitor is replaced")
        run.wait_steps(run.steps_done() + 2)
        assert run.server_pids() == servers
        run.stop()
        run.check_ledger()
        assert len(run.events("monitor.hung")) == 1
        assert len(run.trainer_pids()) == 1
        assert run.events("batch.rejected") == []


def test_a_stopped_coordinator_is_replaced_and_a_server_that_died_meanwhile_too(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        os.kill(run.coordinator_pids()[-1], signal.SIGSTOP)
        run.kill(run.server_pids()["server-0"])
        run.wait_until(lambda: run.events("coordinator.adopted"), "the Coordinator is replaced")
        run.wait_steps(run.steps_done() + 2)
        run.stop()
        run.check_ledger()
        assert len(run.events("coordinator.hung")) == 1
        assert len(run.trainer_pids()) == 1


def test_sigterm_saves_and_says_its_word_as_ctrl_c_does(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(120)
        assert run.process.returncode == 130, run.said()
        assert len(run.events("run.aborted")) == 1
        run.wait_gone()
