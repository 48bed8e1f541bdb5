"""A checkpoint of adapters is verified by what it holds: every factor, with its moments."""

import shutil
from pathlib import Path

import pytest

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.manifest import ADAPTER_FILE, learned_name, stored_name
from launcher.checkpoints.verification import verify
from tests.support.checkpoint_makers import edit_json, edit_tensors, learned, reseal, save, truncate

LORA = {"use_lora": True, "lora_rank": 2, "lora_alpha": 4.0}
FACTOR = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
STATE, FACTS = "training_state.tensors", "training_state.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return save(CheckpointStore(folder / "default"), learned(folder / "model", recipe=LORA), 7).path


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "default" / saved.name))


def test_a_whole_one_is_verified_and_small(checkpoint):
    proof = verify(checkpoint)
    assert proof.is_complete, proof.why_not
    assert (checkpoint / ADAPTER_FILE).is_file()


@pytest.mark.parametrize("name", [f"master.{FACTOR}", f"exp_avg.{FACTOR}"])
def test_a_factor_that_is_missing_is_named(checkpoint, name):
    edit_tensors(checkpoint, STATE, lambda tensors: tensors.pop(name))
    assert name in verify(checkpoint).why_not


def test_a_step_of_what_is_no_adapter_is_named(checkpoint):
    name = "model.norm.weight"
    edit_json(checkpoint, FACTS, lambda facts: facts["optimizer_steps"].update({name: 1}))
    assert f"the optimizer stepped {name}" in verify(checkpoint).why_not


def test_adapters_that_are_cut_off_or_of_another_shape_are_named(checkpoint):
    edit_tensors(
        checkpoint,
        ADAPTER_FILE,
        lambda tensors: tensors.update({stored_name(FACTOR): tensors[stored_name(FACTOR)][:1]}),
    )
    assert FACTOR in verify(checkpoint).why_not
    truncate(checkpoint / ADAPTER_FILE)
    reseal(checkpoint)
    assert ADAPTER_FILE.rpartition("/")[2] in verify(checkpoint).why_not


def test_names_are_pefts_and_back():
    assert stored_name(FACTOR) == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert learned_name(stored_name(FACTOR)) == FACTOR
