"""setup_recovery on AReaL's folders: what its resume loads, at once or not at all, and back again."""

import dataclasses
import json
import pickle
import shutil

import pytest
import torch

from launcher.checkpoints.areal_folders import DATA_FILE, FREQUENCY_FILES, read_recover_info
from launcher.checkpoints.trial_folders import find_trial
from scripts import setup_recovery
from scripts.checkpoints import areal_setup
from scripts.checkpoints.trial_lock import areal_held
from tests.support.checkpoint_makers import (
    EXPERIMENT,
    FREQUENCY,
    TRIAL,
    USER,
    make_areal,
    name_of,
    snapshot,
    truncate,
)
from tests.support.worlds.checkpoints import HEALTHY

TOOL = setup_recovery
REWARDS = [*HEALTHY, *HEALTHY[:30], *[0.0] * 30]


@pytest.fixture
def areal(root):
    return make_areal(root, [20, 40, 60, 99], recover_step=99, rewards=REWARDS)


def test_two_tools_at_once_on_areals(areal, root, tool):
    """Each took the other's staged folder for what a kill had left, and removed it."""
    with areal_held(find_trial(root, USER, EXPERIMENT, TRIAL)):
        before = snapshot(root)
        for choice in ("--good", "--undo"):
            code, said = tool(choice)
            assert code == 2
            assert "is being worked on: another tool holds" in said
            assert ".recovery.lock" in said
        assert snapshot(root) == before
    assert tool("--good")[0] == 0


def weights_of(folder):
    """Loaded as AReaL loads them: into tensors of the model's own names, by torch's own loader."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.stateful import Stateful
    from transformers import AutoConfig, AutoModelForCausalLM

    class State(Stateful):
        def __init__(self, model):
            self.model = model

        def state_dict(self):
            return {"model": get_model_state_dict(self.model)}

        def load_state_dict(self, state):
            set_model_state_dict(self.model, model_state_dict=state["model"])

    export = next(folder.parent.glob("epoch*"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(export))
    load({"dcp": State(model)}, storage_reader=FileSystemReader(folder), no_dist=True)
    return dict(model.state_dict())


def test_areal_gets_the_files_that_its_resume_loads(tool, areal):
    top, info = areal
    data = (info / "dataloader_info.pkl").read_bytes()
    code, said = tool("--good")
    assert code == 0
    assert said.splitlines()[0] == "exp/t1: the next launch resumes from step 60, at step 61"
    assert "fresh one, which needs recover.no_load_optim=true" in said
    assert "the data position is that of step 99" in said
    written = {"step_info.json", *FREQUENCY_FILES, "stats_logger_info.json", DATA_FILE}
    assert {path.name for path in info.iterdir()} == written
    step = json.loads((info / "step_info.json").read_text())
    assert step == {"epoch": 0, "epoch_step": 60, "global_step": 60, "steps_per_epoch": 80}
    assert json.loads((info / "stats_logger_info.json").read_text()) == {"last_commit_step": 59}
    saver = json.loads((info / "saver_info.json").read_text())
    assert saver["step"] == FREQUENCY | {"steps": 61, "last_steps": 60, "interval_steps": 1}
    assert (saver["epoch"]["steps"], saver["epoch"]["last_steps"], saver["time"]["steps"]) == (0, 0, 61)
    assert (info / "dataloader_info.pkl").read_bytes() == data
    assert read_recover_info(info, top / "default" / "recover_checkpoint").problems == ()


@dataclasses.dataclass
class StepInfo:
    """As AReaL has it: made of the file's keys, so one too many or too few is an error."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int


def test_a_loader_that_reads_as_areal_s_does_takes_them(tool, areal):
    _, info = areal
    tool("--good")
    step = StepInfo(**json.loads((info / "step_info.json").read_text()))
    assert step.epoch >= 0
    for file in ("saver_info.json", "evaluator_info.json", "checkpoint_info.json"):
        state = json.loads((info / file).read_text())
        for part in ("epoch", "step", "time"):
            assert set(state[part]) == set(FREQUENCY)
            assert state[part]["last_steps"] <= state[part]["steps"]
    assert json.loads((info / "stats_logger_info.json").read_text())["last_commit_step"] == step.global_step - 1
    ranks = pickle.loads((info / "dataloader_info.pkl").read_bytes())
    assert isinstance(ranks, list)
    assert len(ranks) == 1


def test_the_weights_are_those_of_the_export(tool, areal):
    from safetensors.torch import load_file

    top, _ = areal
    tool("--before-step", "41")
    loaded = weights_of(top / "default" / "recover_checkpoint")
    exported = load_file(top / "default" / str(name_of(40)) / "model.safetensors")
    assert exported.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], exported[name]) for name in exported)
    assert torch.equal(loaded["lm_head.weight"], exported["model.embed_tokens.weight"])


def test_undo_gives_areal_back_what_it_had(tool, areal, root, refused):
    before = snapshot(root)
    tool("--good")
    tool("--before-step", "30")
    assert "the data position is that of step 99" in tool("--before-step", "61")[1]
    assert tool("--undo")[0] == 0
    assert snapshot(root) == before
    assert "nothing was set up" in refused("--undo", code=2)


def test_undo_is_refused_once_areal_has_gone_on_until_what_it_wrote_is_moved_away(tool, areal, root, refused):
    top, info = areal
    before = snapshot(root)
    tool("--good")
    step = json.loads((info / "step_info.json").read_text())
    (info / "step_info.json").write_text(json.dumps(step | {"global_step": 65}))
    assert "AReaL has trained on from step 60" in refused("--undo", code=2)
    for folder in (info, top / "default" / "recover_checkpoint"):
        shutil.rmtree(folder)
    assert tool("--undo")[0] == 0
    assert snapshot(root) == before


def test_areal_s_own_recover_folder_is_better_than_an_export(root, tool):
    make_areal(root, [20, 40], recover_step=45, rewards=REWARDS)
    before = snapshot(root)
    code, said = tool("--before-step", "60")
    assert code == 0
    assert "nothing to do: AReaL's own recover folder fits, of step 45, with its optimizer" in said
    assert snapshot(root) == before
    assert "resumes from step 20" in tool("--before-step", "40")[1]


def test_without_a_data_position_areal_can_not_resume_and_nothing_is_made(root, areal, refused):
    _, info = areal
    truncate(info / "dataloader_info.pkl")
    said = refused("--good")
    assert "dataloader_info.pkl is not a complete pickle" in said
    assert "actor.path=" in said
    shutil.rmtree(info)
    assert "AReaL can't resume without dataloader_info.pkl" in refused("--good")


def test_a_torn_export_is_passed_over(areal, tool):
    top, _ = areal
    truncate(top / "default" / str(name_of(40)) / "model.safetensors")
    code, said = tool("--before-step", "50")
    assert code == 0
    assert "resumes from step 20" in said
    assert "passed over: step 40" in said


def test_the_form_of_before_1_0_is_not_made_up(areal, refused):
    top, _ = areal
    shutil.rmtree(top / "default" / "recover_checkpoint")
    shutil.copytree(top / "default" / str(name_of(20)), top / "default" / "recover_checkpoint")
    assert "as AReaL before 1.0 recovers from" in refused("--good")


def test_where_no_rewards_are_known_nothing_is_good_and_a_step_can_be_named(root, tool, refused):
    make_areal(root, [20, 40], recover_step=60)
    shutil.rmtree(root / "checkpoints" / USER / EXPERIMENT / TRIAL / "default" / "recover_checkpoint")
    said = refused("--good")
    assert "holds no log" in said or ("does not exist" in said and "name one yourself" in said)
    assert "resumes from step 40" in tool("--before-step", "50")[1]


def test_megatron_s_form_is_not_made_up(areal, refused):
    top, _ = areal
    (top / "default" / "recover_checkpoint" / "common.pt").write_bytes(b"x")
    assert "only Megatron can write" in refused("--good")


@pytest.mark.slow
@pytest.mark.parametrize("at", range(8))
def test_a_kill_between_two_renames_is_carried_through_by_the_next_call(areal, root, tool, monkeypatch, at):
    """Never the weights of one step with the counters of another."""
    top, info = areal
    real, moves = areal_setup._move, 0

    def move(source, target):
        nonlocal moves
        if moves == at % 4:
            raise KeyboardInterrupt
        moves += 1
        real(source, target)

    if at >= 4:
        tool("--good")
    with monkeypatch.context() as patched:
        patched.setattr(areal_setup, "_move", move)
        code, said = tool("--undo" if at >= 4 else "--good")
        assert code == 130, said
    if info.exists():
        found = read_recover_info(info, top / "default" / "recover_checkpoint")
        assert found.problems == ()
        assert found.has_optimizer == (found.name.global_step == 99)
    tool("--undo")
    found = read_recover_info(info, top / "default" / "recover_checkpoint")
    assert (found.problems, found.name.global_step, found.has_optimizer) == ((), 99, True)
