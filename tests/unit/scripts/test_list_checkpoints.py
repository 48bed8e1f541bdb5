"""list_checkpoints: the first line answers, each flag does what it says, and looking changes nothing."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_request import ask_restore
from launcher.run_files.run_paths import RunLock
from scripts import list_checkpoints
from tests.support.checkpoint_makers import (
    EXPERIMENT,
    TRIAL,
    USER,
    edit_tensors,
    flip,
    make_areal,
    snapshot,
    truncate,
    write_rewards,
)
from tests.support.worlds.checkpoints import HEALTHY, began

TOOL = list_checkpoints


@pytest.fixture
def tool(tool, root):
    """It changes nothing."""

    def run(*flags, **names):
        before = snapshot(root)
        found = tool(*flags, **names)
        assert snapshot(root) == before
        return found

    return run


@pytest.fixture
def facts(tool):
    def run(*flags):
        code, said = tool("--json", *flags)
        return code, json.loads(said)

    return run


def states(found):
    return {one["step"]: one["state"] for one in found["checkpoints"]}


def test_without_a_name_the_only_live_run_is_meant_though_only_another_has_checkpoints(tool, trial):
    live = replace(trial, trial_name="t2")
    for folder in (live.logs, live.checkpoints):
        folder.mkdir(parents=True)
    (live.logs / "events.jsonl").touch()
    assert tool(names=[])[1].startswith("exp/t1: ")
    with RunLock(live):
        code, out = tool(names=[])
    assert code == 1
    assert out.startswith("exp/t2: no good checkpoint; there is none at all")


@pytest.mark.slow
def test_the_first_line_is_the_answer(tool, trial):
    code, out = tool()
    assert code == 0
    assert out.splitlines()[0].startswith("exp/t1: the last good checkpoint is of step 25, ")
    assert out.splitlines()[0].endswith("epoch0epochstep25globalstep25")
    for word in ("step", "epoch", "age", "size", "reward", "state", "complete", "why", "candidate", "9 healthy steps"):
        assert word in out


def test_json_says_all_of_it(facts, trial):
    code, found = facts()
    assert code == 0
    assert found["format"] == "grpo-checkpoints/1"
    assert states(found) == {5: "good", 15: "good", 25: "good", 30: "candidate", 38: "candidate"}
    assert (found["last_good"], found["last_step"], found["damage"]) == (25, 39, None)
    one = found["checkpoints"][2]
    assert Path(one["path"]) == Path(found["last_good_path"])
    assert one["reward"] == pytest.approx(0.51, abs=0.01)
    assert (one["complete"], one["verified"], one["has_manifest"], one["has_optimizer"]) == (True, None, True, True)
    assert one["bytes"] == sum(file.stat().st_size for file in Path(one["path"]).iterdir())


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--max-step", "25"], [5, 15, 25]),
        (["--before-step", "25"], [5, 15]),
        (["--latest"], [38]),
        (["--good"], [5, 15, 25]),
        (["--good", "--latest"], [25]),
        (["--good", "--latest", "--before-step", "20"], [15]),
        (["--latest", "--max-step", "31", "--verify"], [30]),
    ],
)
def test_each_flag_does_what_it_says(facts, trial, flags, steps):
    code, found = facts(*flags)
    assert (code, list(states(found))) == (0, steps)


def test_nothing_fits_is_exit_code_1_and_says_what_there_is(tool, trial):
    code, out = tool("--before-step", "5")
    assert code == 1
    assert "no checkpoint fits the request; there are checkpoints of steps 5, 15, 25, 30, 38" in out


def test_damage_condemns_and_says_from_where(tool, facts, trial):
    write_rewards(trial, HEALTHY, events=[began(1, 27)])
    _, found = facts()
    assert states(found) == {5: "good", 15: "good", 25: "candidate", 30: "condemned", 38: "condemned"}
    assert found["damage"]["onset_step"] == 27
    assert found["damage"]["first_damaged_checkpoint"] == 26
    lines = tool()[1].splitlines()
    assert "the last good checkpoint is of step 15" in lines[0]
    assert lines[1].startswith("damage from about step 27 on (incident 1, reward_collapse: it fell)")


def test_what_the_run_set_aside_is_listed_as_what_it_is(facts, trial):
    store = CheckpointStore(trial.default_checkpoints)
    store.condemn_after(30)
    store.set_aside_after(25)
    _, found = facts()
    assert states(found) == {5: "good", 15: "good", 25: "good", 30: "unverified", 38: "condemned"}
    assert [one["set_aside_as"] for one in found["checkpoints"]] == ["", "", "", "superseded", "condemned"]
    assert facts("--latest")[1]["checkpoints"][0]["step"] == 25


def test_a_torn_one_is_seen_without_reading_it_and_a_flipped_one_by_verify(tool, facts, trial):
    folder = trial.default_checkpoints
    truncate(folder / "epoch0epochstep25globalstep25" / "model.safetensors")
    flip(folder / "epoch0epochstep15globalstep15" / "training_state.tensors")
    code, found = facts()
    assert code == 0
    assert found["last_good"] == 15
    assert states(found)[25] == "unverified"
    assert "model.safetensors has" in found["checkpoints"][2]["problem"]
    code, found = facts("--verify")
    assert code == 1
    assert found["last_good"] == 5
    assert [one["verified"] for one in found["checkpoints"]] == [True, False, False, True, True]
    assert "training_state.tensors was changed" in found["checkpoints"][1]["problems"][0]
    code, out = tool("--verify")
    assert code == 1
    assert "training_state.tensors was changed" in out


def test_numbers_that_are_not_finite_are_seen_only_by_verify(facts, trial):
    folder = trial.default_checkpoints / "epoch0epochstep25globalstep25"
    edit_tensors(folder, "model.safetensors", lambda t: t["model.norm.weight"][0].fill_(float("nan")))
    assert facts()[1]["last_good"] == 25
    assert facts("--verify")[1]["last_good"] == 15
    assert facts("--verify", "--good", "--latest")[1]["checkpoints"][0]["step"] == 15


def test_half_a_manifest_and_an_empty_folder_are_listed_and_never_good(facts, trial):
    folder = trial.default_checkpoints
    truncate(folder / "epoch0epochstep25globalstep25" / "manifest.json")
    (folder / "epoch0epochstep20globalstep20").mkdir()
    _, found = facts()
    assert states(found) == {
        5: "good",
        15: "good",
        20: "unverified",
        25: "unverified",
        30: "candidate",
        38: "candidate",
    }
    problems = {one["step"]: one["problem"] for one in found["checkpoints"]}
    assert "is empty" in problems[20]
    assert "manifest.json is not a complete manifest" in problems[25]


def test_recover_info_says_what_the_next_launch_takes(tool, facts, trial):
    assert "nothing is set up: the next launch takes the newest" in tool("--recover-info")[1]
    checkpoint = CheckpointStore(trial.default_checkpoints).find(15)
    ask_restore(trial, checkpoint, why="by a person; forced although: it fell", condemn_after=None)
    prepared = facts("--recover-info")[1]["recover"]["prepared"]
    assert (prepared["path"], prepared["step"], prepared["complete"]) == (str(trial.restore), 15, True)
    assert (prepared["source"], prepared["forced"]) == (str(checkpoint.path), "it fell")
    said = tool("--recover-info")[1]
    assert "the next launch goes back to step 15, set up " in said
    assert f" ago from {checkpoint.path}; complete" in said
    flip(checkpoint.path / "position.json")
    assert "what is set up can NOT be taken" in tool("--recover-info")[1]
    trial.restore.unlink()
    trial.recover_checkpoint.mkdir()
    assert "can NOT be taken: " in tool("--recover-info")[1]
    assert facts("--recover-info")[1]["recover"]["prepared"]["step"] is None


# ── AReaL's ──


@pytest.fixture
def areal(root):
    make_areal(root, [20, 40, 60, 99], recover_step=99, rewards=[*HEALTHY, *HEALTHY[:30], *[0.0] * 30])
    return root


@pytest.mark.slow
def test_an_areal_folder_is_listed_and_marked_as_unverified(tool, facts, areal):
    code, found = facts("--recover-info")
    assert code == 0
    assert found["made_by"] == "AReaL"
    assert states(found) == {20: "unverified", 40: "unverified", 60: "unverified", 99: "condemned"}
    assert found["damage"]["onset_step"] == 70
    told = found["recover"]["areal"]
    assert (told["step"], told["complete"], told["problems"]) == (99, True, [])
    assert (told["has_optimizer"], told["steps_per_epoch"]) == (True, 80)
    assert "step 60 would be the last good one" in tool()[1]


def test_an_areal_folder_is_verified_as_far_as_it_can_be(facts, areal):
    code, found = facts("--verify")
    assert code == 0
    assert states(found) == {20: "good", 40: "good", 60: "good", 99: "condemned"}
    assert "nothing vouches for its content, and it holds no optimizer" in found["checkpoints"][0]["notes"][0]
    assert list(states(facts("--good")[1])) == [20, 40, 60]


def test_a_cut_export_is_seen(facts, areal):
    folder = areal / "checkpoints" / USER / EXPERIMENT / TRIAL / "default" / "epoch0epochstep40globalstep40"
    (folder / "tokenizer_config.json").unlink()
    _, found = facts()
    assert "the export was cut short" in found["checkpoints"][1]["problem"]
    assert list(states(facts("--good")[1])) == [20, 60]


@pytest.mark.parametrize("layout", ["plain", "recover"])
def test_the_older_layouts(root, tool, layout):
    make_areal(root, [20], recover_step=20, layout=layout)
    code, out = tool("--recover-info")
    assert code == 0
    assert "recover_info is of step 20" in out


def test_nothing_is_ever_unpickled(root, tool, tmp_path):
    trap = tmp_path / "it was unpickled"
    make_areal(root, [20], recover_step=20, trap=str(trap))
    assert tool("--recover-info", "--verify")[0] == 0
    assert not trap.exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda t, i: (i / "saver_info.json").unlink(), "saver_info.json is missing"),
        (lambda t, i: truncate(i / "step_info.json"), "step_info.json is not valid JSON"),
        (lambda t, i: truncate(i / "dataloader_info.pkl"), "dataloader_info.pkl is not a complete pickle"),
        (lambda t, i: (i / "evaluator_info.json").write_text("{}"), "evaluator_info.json: epoch lacks"),
        (lambda t, i: (i / "stats_logger_info.json").write_text("{}"), "has no last_commit_step"),
        (lambda t, i: next((t / "default/recover_checkpoint").glob("*.distcp")).unlink(), ".metadata names it"),
        (lambda t, i: shutil.rmtree(t / "default/recover_checkpoint"), "AReaL has no model to recover from"),
        (lambda t, i: os.utime(i / "step_info.json", (1, 1)), "may be of a later step than it says"),
    ],
)
def test_recover_files_that_areal_could_not_use_name_themselves(root, tool, damage, told):
    damage(*make_areal(root, [20], recover_step=20))
    out = tool("--recover-info")[1]
    assert "it can NOT resume" in out
    assert told in out
