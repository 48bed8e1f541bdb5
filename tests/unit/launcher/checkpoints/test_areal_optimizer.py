"""The optimizer's own counter decides whether AReaL's recover folder mixes two steps; a copy's times do not."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch

from launcher.checkpoints.areal_folders import METADATA, read_recover_info
from launcher.checkpoints.areal_optimizer import optimizer_steps
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.trial_folders import find_trial
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, make_areal


def trained_dcp(folder, steps, optimizer=torch.optim.AdamW):
    """Model and optimizer as AReaL saves them: torch's own state dicts, written by its own writer."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    updates = optimizer(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        updates.step()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights, state = get_state_dict(model, updates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is what is meant
        save({"dcp": {"model": weights, "optim": state}}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("steps", [1, 7, 400])
def test_the_counter_is_torchs(tmp_path, steps):
    folder = trained_dcp(tmp_path / "dcp", steps)
    assert optimizer_steps(folder, (folder / METADATA).read_bytes()) == steps


def test_without_counters_nothing_is_known(tmp_path):
    folder = trained_dcp(tmp_path / "sgd", 3, torch.optim.SGD)
    assert optimizer_steps(folder, (folder / METADATA).read_bytes()) is None
    folder = trained_dcp(tmp_path / "cut", 3)
    os.truncate(folder / "__0_0.distcp", 100)
    assert optimizer_steps(folder, (folder / METADATA).read_bytes()) is None


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_what_a_pickle_names_is_not_run(tmp_path):
    mark = tmp_path / "it ran"
    assert optimizer_steps(tmp_path, pickle.dumps({"storage_data": Bomb(mark)})) is None
    assert not mark.exists()


@pytest.fixture
def trial(tmp_path):
    """Saved after step 9 with four updates a step, as its config.yaml says."""
    make_areal(tmp_path, [5], recover_step=9, rewards=[0.5] * 10)
    found = find_trial(tmp_path, USER, EXPERIMENT, TRIAL)
    (found.logs / "config.yaml").write_text("actor:\n  ppo_n_minibatches: 4\n")
    return found


def info_of(trial):
    return CheckpointCatalog(trial, HealthEvidence()).recover_info


def dated(trial, *, metadata_later_s):
    at = (trial.recover_info / "step_info.json").stat().st_mtime + metadata_later_s
    os.utime(trial.areal_checkpoint / METADATA, (at, at))


def test_a_copy_with_other_times_is_whole(trial):
    """`cp -r` dates what it writes last as the newest."""
    trained_dcp(trial.areal_checkpoint, 40)
    dated(trial, metadata_later_s=30.0)
    assert info_of(trial).problems == ()


def test_one_overwritten_by_a_later_step_is_torn_whatever_its_times(trial):
    trained_dcp(trial.areal_checkpoint, 44)
    dated(trial, metadata_later_s=-30.0)
    (problem,) = info_of(trial).problems
    assert "the optimizer has made 44 steps, 4 a step" in problem
    assert "weights are of step 10 or later" in problem


@pytest.mark.parametrize("counted", [12, 38])
def test_a_fresh_optimizer_and_updates_left_out_count_fewer(trial, counted):
    """The counter does not decide then: the times do."""
    trained_dcp(trial.areal_checkpoint, counted)
    dated(trial, metadata_later_s=-30.0)
    assert info_of(trial).problems == ()
    dated(trial, metadata_later_s=30.0)
    assert "was written 30.0 s after" in info_of(trial).problems[0]


def test_without_the_settings_a_multiple_of_the_steps_is_whole(trial):
    (trial.logs / "config.yaml").unlink()
    trained_dcp(trial.areal_checkpoint, 20)
    dated(trial, metadata_later_s=30.0)
    assert info_of(trial).problems == ()
    trained_dcp(trial.areal_checkpoint, 23)
    dated(trial, metadata_later_s=30.0)
    assert "was written" in info_of(trial).problems[0]


@pytest.mark.parametrize("to", [7, 12])
def test_an_edited_step_info_is_not_taken(trial, to):
    trained_dcp(trial.areal_checkpoint, 40)
    file = trial.recover_info / "step_info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"epoch_step": to, "global_step": to}))
    problems = read_recover_info(trial.recover_info, trial.areal_checkpoint).problems
    said = f"says step {to}, but saver_info.json counts 10 steps, and stats_logger_info.json ends with step 8"
    assert any(said in problem for problem in problems)


def test_several_tables_a_step_make_no_other_step(trial):
    """Up to 0.4.0 the logger counts each table."""
    trained_dcp(trial.areal_checkpoint, 40)
    (trial.recover_info / "stats_logger_info.json").write_text('{"last_commit_step": 35}')
    assert info_of(trial).problems == ()
