"""The same command again: after the trainer, the driver and Ray itself were killed, and after setup_recovery. One run,
whose first life is broken as often as it can be before it is asked to go back: when it is over, and while it runs."""

import pytest

from actors.monitoring.reward_series import RewardSeries
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from scripts import list_checkpoints, setup_recovery
from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import kill_command

pytestmark = pytest.mark.timeout(600)

STEPS, BACK_TO = 22, 9


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
    with SupervisedRun(folder, steps=STEPS, servers=1, settings=["restart.cluster=0"]) as resumed:
        resumed.wait_until(lambda: len(resumed.events("trainer.restored")) == 3, "it goes on")
        first, second, third = (event["global_step"] for event in resumed.events("trainer.restored"))
        assert (first, second >= 6, third >= 9) == (-1, True, True)
        resumed.lose_ray("gcs_server")
    with SupervisedRun(folder, steps=STEPS, servers=1) as finished:
        finished.finish()
        finished.check_ledger()
        assert [line["global_step"] for line in finished.ledger()] == list(range(STEPS)), "no step was taken back"
        assert "undone" not in finished.paths.summary.read_text()
        assert not InMemoryCheckpoints(finished.paths).root.exists()


def test_a_finished_run_goes_back_and_on(folder, capsys):
    again = SupervisedRun(folder, steps=STEPS, servers=1)
    assert list_checkpoints.main(names(again.paths)) == 0
    assert f"the last good checkpoint is of step {BACK_TO}" in capsys.readouterr().out
    assert setup_recovery.main([*names(again.paths), "--good"]) == 0
    before = len(again.ledger())
    with again:
        assert f"resuming from epoch0epochstep{BACK_TO}globalstep{BACK_TO}, as it was set up" in again.finish()
        again.check_ledger()
        repeated = [line["global_step"] for line in again.ledger()[before:]]
        assert repeated == list(range(BACK_TO + 1, STEPS))
        assert [event["global_step"] for event in again.events("recovery.taken")] == [BACK_TO]
        assert again.events("trainer.restored")[-1]["global_step"] == BACK_TO
        assert RewardSeries.read(again.paths).next_step == STEPS
        assert not again.paths.restore.exists()
        assert not again.paths.restore_taking.exists()
        newest = CheckpointStore(again.paths.default_checkpoints).latest_complete()
        assert newest.checkpoint.global_step == STEPS - 1
        assert newest.skipped == ()


def test_a_running_run_goes_back_and_on(folder, capsys):
    """Its Coordinator is killed when it has taken the request. The trainer stays, and no step before is lost."""
    more = SupervisedRun(folder, steps=STEPS + 12, servers=1)
    before, back_to = len(more.ledger()), STEPS - 1
    with more:
        more.wait_until(lambda: len(more.ledger()) >= before + 3, "it steps")
        trainer, loads = more.trainer_pids()[-1], len(more.events("trainer.restored"))
        assert setup_recovery.main([*names(more.paths), "--before-step", str(STEPS)]) == 0
        assert f"the run goes back to step {back_to}, at step {STEPS}" in capsys.readouterr().out
        more.wait_until(lambda: not more.paths.restore.exists(), "its Coordinator has taken it")
        more.kill(more.coordinator_pids()[-1])
        more.wait_until(lambda: len(more.events("recovery.taken")) == 2, "it has gone back")
        more.finish()
        more.check_ledger()
        assert more.trainer_pids()[-1] == trainer, "it was not restarted"
        assert [event["global_step"] for event in more.events("recovery.taken")] == [BACK_TO, back_to]
        assert {event["global_step"] for event in more.events("trainer.restored")[loads:]} == {back_to}
        since = [line["global_step"] for line in more.ledger()[before:]]
        again = since.index(STEPS, 1)
        assert since == [*range(STEPS, STEPS + again), *range(STEPS, STEPS + 12)]
        assert not more.paths.restore.exists()
        assert not more.paths.restore_taking.exists()
