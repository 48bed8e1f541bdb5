"""setup_recovery: the newest that fits, proven; refused with the reason; on AReaL's, what its own resume loads."""

import json
import shutil

import pytest

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_request import read_request, take_restore
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunLock, names_of
from scripts import setup_recovery
from tests.programs.killed_restore import Victim
from tests.programs.killed_saver import CALLS
from tests.support.checkpoint_makers import edit_tensors, flip, make_export, name_of, snapshot, write_rewards
from tests.support.trial_names import NAMES, trial_paths
from tests.support.worlds.checkpoints import HEALTHY, began

TOOL = setup_recovery


def step_of(trial):
    return read_request(trial).step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "step"), [(["--good"], 25), (["--before-step", "30"], 25), (["--before-step", "25"], 15)]
)
def test_the_newest_that_fits(tool, trial, flags, step):
    code, said = tool(*flags)
    assert code == 0
    assert step_of(trial) == step
    assert said.splitlines()[0] == f"exp/t1: the next launch resumes from step {step}, at step {step + 1}"
    assert f"({trial.restore})" in said
    assert "continue with: " in said


def test_a_path(tool, trial):
    folder = CheckpointStore(trial.default_checkpoints).find(15).path
    assert tool("--checkpoint-path", folder)[0] == 0
    assert step_of(trial) == 15


def test_json(tool, trial):
    _, said = tool("--good", "--json")
    facts = json.loads(said)
    assert (facts["step"], facts["how"], facts["has_optimizer"]) == (25, str(trial.restore), True)
    assert facts["recover_checkpoint"] == facts["source"]
    assert (facts["is_running"], facts["in_place_of_step"]) == (False, None)
    assert json.loads(tool("--undo", "--json")[1])["undone"] is True


def test_undo(tool, trial, refused):
    before = snapshot(trial.checkpoints)
    tool("--good")
    code, said = tool("--undo")
    assert code == 0
    assert "undone" in said
    assert snapshot(trial.checkpoints) == before
    assert "nothing is set up" in refused("--undo", code=2)


def test_asked_again_says_what_it_replaces(tool, trial):
    tool("--before-step", "25")
    code, said = tool("--good")
    assert code == 0
    assert "in place of the set-up of step 15, which the run has not taken" in said
    assert step_of(trial) == 25


def test_what_the_run_has_taken_is_undone_by_another_restore(tool, trial, refused):
    tool("--good")
    take_restore(trial, Journal(trial.events, 2))
    said = refused("--undo", code=2)
    assert "undone by another restore" in said
    (lying,) = (trial.default_checkpoints / "set_aside").glob("*globalstep38.*")
    assert str(lying.parent) in said
    assert tool("--checkpoint-path", lying)[0] == 0
    assert take_restore(trial, Journal(trial.events, 3)).global_step == 38


def test_a_torn_one_is_passed_over_and_refused_by_its_path_whatever_is_forced(tool, trial, refused):
    store = CheckpointStore(trial.default_checkpoints)
    flip(store.find(25).path / "training_state.tensors")
    refusal = refused("--checkpoint-path", store.find(25).path, "--force")
    assert "training_state.tensors was changed" in refusal
    assert "never set up" in refusal
    code, said = tool("--good")
    assert code == 0
    assert step_of(trial) == 15
    assert "passed over: step 25: " in said
    assert "training_state.tensors was changed" in said


def test_one_with_nan_in_it_is_torn_too(tool, trial):
    folder = CheckpointStore(trial.default_checkpoints).find(25).path
    edit_tensors(folder, "model.safetensors", lambda t: t["model.norm.weight"][0].fill_(float("nan")))
    assert "not finite" in tool("--good")[1]
    assert step_of(trial) == 15


def test_an_export_in_a_run_of_ours_is_nothing_to_go_on_from(tool, trial, refused):
    folder = make_export(trial.default_checkpoints / str(name_of(27)))
    assert "without optimizer and data position" in refused("--checkpoint-path", folder)
    assert tool("--good")[0] == 0
    assert step_of(trial) == 25


def test_one_from_after_the_onset_only_by_force(tool, trial, refused):
    write_rewards(trial, HEALTHY, events=[began(1, 20)])
    folder = CheckpointStore(trial.default_checkpoints).find(25).path
    assert "holds damage" in refused("--checkpoint-path", folder)
    code, said = tool("--before-step", "30")
    assert code == 0
    assert step_of(trial) == 15
    assert "damage from about step 20 on" in said
    assert read_request(trial).condemn_after == 18
    code, said = tool("--checkpoint-path", folder, "--force")
    assert code == 0
    assert "FORCED although: checkpoints from step 19 on hold the damage" in said
    assert step_of(trial) == 25
    assert read_request(trial).condemn_after is None
    assert read_request(trial).forced == "checkpoints from step 19 on hold the damage"
    assert tool("--before-step", "39", "--force")[0] == 0
    assert step_of(trial) == 38


def test_what_was_condemned_only_by_its_path_and_by_force(tool, trial, refused):
    aside = CheckpointStore(trial.default_checkpoints).condemn_after(20)
    assert "holds damage" in refused("--checkpoint-path", aside[-1])
    tool("--good", "--force")
    assert step_of(trial) == 15
    assert tool("--checkpoint-path", aside[-1], "--force")[0] == 0
    assert step_of(trial) == 25


@pytest.mark.slow
@pytest.mark.skipif(not CALLS, reason="the numbers of this processor's system calls are not known")
def test_the_command_killed_at_each_call_that_changes_the_file_system(tool, trial, root, tmp_path):
    """The request of before is there, or the new one; nothing else changes."""
    tool("--good")
    victim, steps = Victim(), []
    shutil.copytree(root, tmp_path / "whole")
    calls = victim.does("command", tmp_path / "whole")
    assert calls.keys() >= {"write", "fsync", "rename"}
    before = {name: data for name, data in snapshot(trial.checkpoints).items() if name != "restore.json"}
    for number in range(1, sum(calls.values()) + 1):
        killed = tmp_path / str(number)
        shutil.copytree(root, killed)
        assert sum(victim.does("command", killed, number).values()) == number, "it was killed before that call"
        paths = trial_paths(killed)
        steps.append(read_request(paths).step)
        after = snapshot(paths.checkpoints)
        assert {name: after[name] for name in after if "restore.json" not in name} == before
        again = ["--fileroot", str(killed), *NAMES, "--before-step", "16"]
        assert TOOL.main(again) == 0
        assert read_request(paths).step == 15
        assert [path.name for path in paths.checkpoints.iterdir() if "restore" in path.name] == ["restore.json"]
    victim.close()
    print(f"killed before each of {sum(calls.values())} system calls: {calls}")
    assert steps == sorted(steps, reverse=True)
    assert {*steps} == {25, 15}


def test_nothing_fits_says_why(trial, refused):
    said = refused("--before-step", "5")
    assert "the oldest is of step 5" in said
    assert f"list_checkpoints {names_of(trial)} --verify" in said, "to be typed as it stands"
    write_rewards(trial, HEALTHY[:4])
    assert "step 38 is candidate (0 healthy steps after it, 10 are needed)" in refused("--good")


def test_a_run_that_is_running_is_asked_and_one_that_a_tool_holds_is_left_alone(tool, trial, refused):
    with RunLock(trial):
        code, said = tool("--good")
        assert code == 0
        assert said.splitlines()[0] == "exp/t1: the run goes back to step 25, at step 26"
        assert "it is running, and does so by itself" in said
        assert "continue with" not in said
        assert step_of(trial) == 25
        assert "undone; nothing is set up" in tool("--undo")[1]
    with RunLock(trial, tool="resume_training"):
        assert "is being worked on by resume_training: pid" in refused("--good", code=2)


def test_what_an_earlier_version_set_up_is_refused_and_kept(trial, refused):
    shutil.copytree(CheckpointStore(trial.default_checkpoints).find(15).path, trial.recover_checkpoint)
    said = refused("--good", code=2)
    assert "an earlier version set up" in said
    assert "move that folder away" in said


def test_a_checkpoint_that_lies_elsewhere_is_to_be_copied_first(trial, refused, tmp_path):
    there = CheckpointStore(trial.default_checkpoints).find(15).path
    shutil.copytree(there, tmp_path / there.name)
    said = refused("--checkpoint-path", tmp_path / there.name, code=2)
    assert "is not one of the run's checkpoints" in said
    assert f"copy it into {trial.default_checkpoints} first" in said


def test_a_path_that_is_no_checkpoint(trial, refused, tmp_path):
    assert "there is no folder" in refused("--checkpoint-path", tmp_path / "nope", code=2)
    assert "is no checkpoint's name" in refused("--checkpoint-path", tmp_path, code=2)
