"""A HealthMonitor that is stopped, and so is alive to Ray and answers nobody: it is replaced, and the steps go on."""

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
