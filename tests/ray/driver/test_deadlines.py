"""Before its machine is taken away a run saves and ends with exit code 75, and the same command resumes it.

How a deadline is counted, `run.walltime` too: tests/unit/launcher/cli/test_deadlines.py.
"""

import signal

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(900)

DUE_AT_ONCE = ("run.notice_s=1", "run.margin_s=0")


def ends_with_75(run):
    run.process.wait(scaled(400))
    assert run.process.returncode == 75, f"{run.said()}\n{run.tail()}"
    aborted = run.events("run.aborted")[-1]
    assert (aborted["exit_code"], aborted["reason"]) == (75, run.events("run.deadline")[-1]["reason"])
    assert f"stopping: {aborted['reason'].partition(' ends in ')[0]}" in run.said()
    assert run.events("checkpoint.committed")[-1]["global_step"] == run.steps_done() - 1, "its last step is on the disk"
    run.wait_gone()
    return aborted["reason"]


def test_a_notice_and_a_signal_each_save_and_the_same_command_resumes_with_the_next_step(tmp_path):
    notice = tmp_path / "notice"
    noticed = [f"run.preemption_notice={notice}", "run.notice_interval_s=0.1", *DUE_AT_ONCE]
    with SupervisedRun(tmp_path, steps=9000, servers=1, settings=noticed) as run:
        run.wait_steps(3)
        notice.touch()
        assert f"the notice in {notice}" in ends_with_75(run)
        first = run.steps_done()
    with SupervisedRun(tmp_path, steps=9000, servers=1, settings=DUE_AT_ONCE) as run:
        run.wait_steps(first + 3)
        run.process.send_signal(signal.SIGUSR1)
        assert ends_with_75(run).startswith("the time that SIGUSR1 leaves ends in ")
        run.steps = run.steps_done()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "nothing was lost or repeated"
