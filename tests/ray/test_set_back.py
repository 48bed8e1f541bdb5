"""What setup_recovery prepares is what the next launch really goes on from, on real Ray."""

from actors.run_series import RunSeries
from launcher.checkpoints import CheckpointStore
from scripts import list_checkpoints, setup_recovery
from tests.supervised_run import SupervisedRun

STEPS, BACK_TO = 22, 9


def names(paths):
    return [
        "--fileroot",
        str(paths.fileroot),
        "--experiment-name",
        paths.experiment_name,
        "--trial-name",
        paths.trial_name,
    ]


def test_a_finished_run_goes_back_and_on(tmp_path, capsys):
    with SupervisedRun(tmp_path, steps=STEPS, servers=1) as run:
        run.finish()
        assert list_checkpoints.main(names(run.paths)) == 0
        assert "the last good checkpoint is of step 9" in capsys.readouterr().out
        assert setup_recovery.main([*names(run.paths), "--good"]) == 0
        before = len(run.ledger())
    with SupervisedRun(tmp_path, steps=STEPS, servers=1) as again:
        assert f"going on from epoch0epochstep{BACK_TO}globalstep{BACK_TO}, as it was set up" in again.finish()
        again.check_ledger()
        repeated = [line["global_step"] for line in again.ledger()[before:]]
        assert repeated == list(range(BACK_TO + 1, STEPS))
        assert [event["global_step"] for event in again.events("recovery.taken")] == [BACK_TO]
        assert again.events("trainer.restored")[-1]["global_step"] == BACK_TO
        assert RunSeries(again.paths).next_step == STEPS
        assert not again.paths.recover_checkpoint.exists()
        newest = CheckpointStore(again.paths.default_checkpoints).latest_whole()
        assert newest.checkpoint.global_step == STEPS - 1 and newest.skipped == ()
