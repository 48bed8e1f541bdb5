"""The same command again: after the trainer and the driver were killed, and after setup_recovery. One run, which is
broken before it is asked to go back: when it is over, and while it runs.

After Ray itself was lost: tests/e2e/test_one_run.py.
"""

import pytest

from actors.monitoring.reward_series import RewardSeries
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from scripts import list_checkpoints, setup_recovery
from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import kill_command

pytestmark = pytest.mark.timeout(600)

STEPS, BACK_TO = 22, 9
MORE = STEPS + 12
NEWEST = 19
"""The step of the newest checkpoint before `STEPS`, where no run ends there; one is saved every five steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def names(paths):
    return [
        "--fileroot",
        str(paths.fileroot),
        "--experiment-name",
        paths.experiment_name,
        "--trial-name",
        paths.trial_name,
    ]


def test_a_killed_trainer_and_a_killed_driver_take_no_step_back(folder):
    with SupervisedRun(folder, steps=STEPS, servers=1) as run:
        run.wait_steps(7)
        server = run.server_pids()
        run.kill(run.trainer_pids()[-1])
        run.wait_until(lambda: run.events("trainer.restarted"), "the trainer is back")
        run.wait_steps(10)
        assert run.server_pids() == server
        assert len(set(run.trainer_pids())) == 2
        kill_command(run.process.pid)
        run.process.wait()
    with SupervisedRun(folder, steps=STEPS, servers=1) as resumed:
        resumed.finish()
        first, second, third = (event["global_step"] for event in resumed.events("trainer.restored"))
        assert (first, second >= 6, third >= 9) == (-1, True, True)
        resumed.check_ledger()
        assert [line["global_step"] for line in resumed.ledger()] == list(range(STEPS)), "no step was taken back"
        assert "undone" not in resumed.paths.summary.read_text()
        assert not InMemoryCheckpoints(resumed.paths).root.exists()


def test_a_finished_run_goes_back_and_on(folder, capsys):
    """And back again while it runs. Its Coordinator is killed when it has taken the second request: the trainer stays,
    and no step before is lost."""
    again = SupervisedRun(folder, steps=MORE, servers=1)
    assert list_checkpoints.main(names(again.paths)) == 0
    assert f"the last good checkpoint is of step {BACK_TO}" in capsys.readouterr().out
    assert setup_recovery.main([*names(again.paths), "--good"]) == 0
    before = len(again.ledger())
    to_the_end = list(range(BACK_TO + 1, STEPS))
    with again:
        again.wait_until(lambda: len(again.ledger()) >= before + len(to_the_end) + 3, "it steps")
        assert not again.paths.restore.exists()
        assert not again.paths.restore_taking.exists()
        trainer, loads = again.trainer_pids()[-1], len(again.events("trainer.restored"))
        assert again.events("trainer.restored")[-1]["global_step"] == BACK_TO
        assert setup_recovery.main([*names(again.paths), "--before-step", str(STEPS)]) == 0
        assert f"the run goes back to step {NEWEST}, at step {NEWEST + 1}" in capsys.readouterr().out
        again.wait_until(lambda: not again.paths.restore.exists(), "its Coordinator has taken it")
        again.kill(again.coordinator_pids()[-1])
        again.wait_until(lambda: len(again.events("recovery.taken")) == 2, "it has gone back")
        assert f"resuming from epoch0epochstep{BACK_TO}globalstep{BACK_TO}, as it was set up" in again.finish()
        again.check_ledger()
        assert again.trainer_pids()[-1] == trainer, "it was not restarted"
        assert [event["global_step"] for event in again.events("recovery.taken")] == [BACK_TO, NEWEST]
        assert {event["global_step"] for event in again.events("trainer.restored")[loads:]} == {NEWEST}
        since = [line["global_step"] for line in again.ledger()[before:]]
        taken_back = since[len(to_the_end) : len(since) - (MORE - NEWEST - 1)]
        assert since == [*to_the_end, *taken_back, *range(NEWEST + 1, MORE)]
        assert taken_back == list(range(STEPS, STEPS + len(taken_back)))
        assert RewardSeries.read(again.paths).next_step == MORE
        assert not again.paths.restore.exists()
        assert not again.paths.restore_taking.exists()
        newest = CheckpointStore(again.paths.default_checkpoints).latest_complete()
        assert newest.checkpoint.global_step == MORE - 1
        assert newest.skipped == ()
