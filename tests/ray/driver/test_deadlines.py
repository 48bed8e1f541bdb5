"""Before its machine is taken away a run saves and ends with exit code 75, and the same command resumes it."""

import signal
import time

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(1500)


def ends_with_75(run):
    run.process.wait(scaled(400))
    assert run.process.returncode == 75, f"{run.said()}\n{run.tail()}"
    aborted = run.events("run.aborted")[-1]
    assert (aborted["exit_code"], aborted["reason"]) == (75, run.events("run.deadline")[-1]["reason"])
    assert run.events("checkpoint.committed")[-1]["global_step"] == run.steps_done() - 1, "its last step is on the disk"
    run.wait_gone()
    return aborted["reason"]


def test_a_signal_a_walltime_and_a_notice_each_save_and_the_same_command_finishes_the_run(tmp_path):
    began = time.monotonic()
    due_at_once = ["run.notice_s=1", "run.margin_s=0"]
    with SupervisedRun(tmp_path, steps=9000, servers=1, settings=due_at_once) as run:
        run.wait_steps(3)
        needed_s = time.monotonic() - began
        run.process.send_signal(signal.SIGUSR1)
        assert ends_with_75(run).startswith("the time that SIGUSR1 leaves ends in ")
        first = run.steps_done()
    walltime = int(2.5 * needed_s) + 40
    with SupervisedRun(
        tmp_path, steps=9000, servers=1, settings=[f"run.walltime='{walltime}'", "run.margin_s=2"]
    ) as run:
        assert ends_with_75(run).startswith(f"run.walltime={walltime} ends in ")
        second = run.steps_done()
        assert second > first
        assert "stopping: run.walltime=" in run.said()
    notice = tmp_path / "notice"
    settings = [f"run.preemption_notice={notice}", "run.notice_interval_s=0.1", *due_at_once]
    with SupervisedRun(tmp_path, steps=9000, servers=1, settings=settings) as run:
        run.wait_steps(second + 3)
        notice.touch()
        assert f"the notice in {notice}" in ends_with_75(run)
        third = run.steps_done()
    with SupervisedRun(tmp_path, steps=third + 3, servers=1) as run:
        run.finish()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "nothing was lost or repeated"
