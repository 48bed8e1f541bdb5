"""What WandB exports: charts and histories as CSV, and the files of offline runs, also torn ones."""

import numpy as np
import pytest

from launcher.base.errors import DataError
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.log_records import GRAD_NORM, REWARD
from launcher.diagnosis.reading.wandb_files import BLOCK, read_records
from tests.support.machine import wait_until


def read(path, **kwargs):
    return read_inputs(find_inputs([path]), **kwargs)


def csv(tmp_path, text):
    path = tmp_path / "export.csv"
    path.write_text(text)
    return path


def test_a_charts_csv(tmp_path):
    head = '"Step","exp_t_train - grpo_actor/task_reward/avg","exp_t_train - grpo_actor/task_reward/avg__MIN"\n'
    steps = read(csv(tmp_path, head + '"0","0.25","0.1"\n"1","0.5","0.2"\n')).steps
    assert (steps.steps.tolist(), steps.column(REWARD).tolist()) == ([0, 1], [0.25, 0.5])


def test_a_historys_csv_with_gaps_and_a_torn_end(tmp_path):
    head = "\ufeff,_step,_timestamp,rollout/reward,ppo_actor/update/grad_norm\n"
    text = head + "0,0,1762850000,0.5,0.1\n1,1,1762850060,,0.2\n2,2,1762850120,NaN,0.3\n3,3"
    steps = read(csv(tmp_path, text)).steps
    assert steps.steps.tolist() == [0, 1, 2]
    assert np.isnan(steps.column(REWARD)[1:]).all()
    assert steps.column(GRAD_NORM).tolist() == [0.1, 0.2, 0.3]
    assert np.diff(steps.times).tolist() == [60, 60]


def test_keys_of_several_charts_side_by_side(tmp_path):
    head = "Step,r - ppo_actor/task_reward/avg,r - ppo_actor/update/grad_norm\n"
    steps = read(csv(tmp_path, head + "0,0.5,\n0,,0.3\n1,0.6,0.4\n")).steps
    assert (steps.column(REWARD).tolist(), steps.column(GRAD_NORM).tolist()) == ([0.5, 0.6], [0.3, 0.4])


def test_of_several_runs_one_must_be_named(tmp_path):
    path = csv(tmp_path, "Step,a - rollout/reward,b - rollout/reward\n0,0.1,0.9\n1,0.2,0.8\n")
    with pytest.raises(DataError, match=r"columns of 2 runs: a, b[\s\S]*--metric 'a - rollout/reward'"):
        read(path)
    assert read(path, metric="b - rollout/reward").steps.column(REWARD).tolist() == [0.9, 0.8]


@pytest.mark.parametrize("text", ["", "Step,a\n", "nothing\n1\n"])
def test_a_table_without_steps_is_refused(tmp_path, text):
    with pytest.raises(DataError):
        read(csv(tmp_path, text))


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A file that wandb itself wrote, of several blocks."""
    import wandb

    folder = tmp_path_factory.mktemp("offline")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False)
    run = wandb.init(mode="offline", dir=folder, project="p", id="exp_trial_train", settings=settings)
    for step in range(150):
        more = {f"timeperf/part{i}": float(i) for i in range(30)}
        run.log({"ppo_actor/task_reward/avg": 0.6 if step < 100 else 0.0, **more}, step=step)
    run.finish()
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: len(read(path).steps) == 150, "what wandb's own process writes, which may go on after finish()")
    return path


@pytest.mark.slow
def test_an_offline_file_is_read_whole(offline):
    assert offline.stat().st_size > 2 * BLOCK
    steps = read(offline).steps
    assert steps.steps.tolist() == list(range(150))
    assert steps.column(REWARD).tolist() == [0.6] * 100 + [0.0] * 50
    assert np.isfinite(steps.times).all()


@pytest.mark.slow
def test_a_torn_offline_file_is_read_to_the_tear(offline, tmp_path):
    data = offline.read_bytes()
    for length in (len(data) // 2, len(data) // 2 + 1, BLOCK + 3):
        torn = tmp_path / f"{length}.wandb"
        torn.write_bytes(data[:length])
        steps = read(torn).steps
        assert 0 < len(steps) < 150
        assert steps.steps.tolist() == list(range(len(steps)))


@pytest.mark.slow
def test_a_flipped_byte_spoils_no_figure(offline, tmp_path):
    data = bytearray(offline.read_bytes())
    data[BLOCK + 500] ^= 0xFF
    path = tmp_path / "flipped.wandb"
    path.write_bytes(data)
    steps = read(path).steps
    assert 0 < len(steps) < 150
    assert set(steps.column(REWARD).tolist()) <= {0.6, 0.0}


def test_an_offline_folder_is_enough(offline):
    assert len(read(offline.parent.parent.parent).steps) == 150


def test_what_is_no_such_file_is_said(tmp_path):
    path = tmp_path / "x.wandb"
    path.write_bytes(b"not one")
    with pytest.raises(DataError, match=r"not a \.wandb file"):
        list(read_records(path))


def test_a_table_whose_reward_is_called_otherwise_is_no_healthy_run(tmp_path):
    """It said FINE, and that no step was done."""
    path = csv(tmp_path, "global_step,mean_score\n0,0.5\n1,0.6\n")
    with pytest.raises(DataError) as refused:
        read(path)
    assert "no step in" in refused.value.message
    assert "--metric KEY, of mean_score" in refused.value.hint
    assert len(read(path, metric="mean_score").steps) == 2
