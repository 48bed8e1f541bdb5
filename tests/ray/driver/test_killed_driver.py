"""The driver of a run is killed, and the run finishes by itself, without any flag."""

import signal

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import driver_of

pytestmark = pytest.mark.timeout(900)

STEPS = 26
"""More than the run takes while it is broken twice, also where this test gets its turns late."""


def test_a_killed_driver_is_begun_again_and_the_run_finishes_with_its_ledger_whole(tmp_path):
    with SupervisedRun(tmp_path, steps=STEPS, servers=1) as run:
        for number, how in enumerate((signal.SIGKILL, signal.SIGSEGV), start=1):
            run.wait_steps(run.steps_done() + 3)
            before = set(run.family())
            driver_of(run.process.pid).send_signal(how)
            run.wait_until(lambda n=number: len(run.events("incident.ended", "driver")) == n, "the next one trains")
            assert {one.pid for one in before & set(run.family())} == {run.process.pid}, (
                "nothing of the old one is left"
            )
            ended = run.events("incident.ended", "driver")[-1]
            assert ended["reason"] == "training continues; no committed step was lost"
        said = run.finish()
        run.wait_gone()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(STEPS)), "no step was taken twice"
        assert set(run.incidents().values()) == {("driver_lost", "driver", True)}
        assert [event["times"] for event in run.events("driver.restarted")] == [1, 2]
        assert "incident 2: the run's driver was killed (it was ended by SIGSEGV; 2 times in this command)" in said


def test_ctrl_c_reaches_the_driver_through_its_parent_and_saves(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        said = run.stop()
        run.wait_gone()
        assert "stopping: the step under way is finished and saved" in said
        (aborted,) = run.events("run.aborted")
        assert aborted["reason"] == "ended by the user"
