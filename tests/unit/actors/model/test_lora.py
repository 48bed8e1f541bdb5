"""Adapters learn, the model's own weights don't, servers get what acts the same, and PEFT reads what was saved."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launcher.base.errors import CheckpointError
from launcher.checkpoints.manifest import ADAPTER_FILE, TENSORS_FILE, learned_name, stored_name
from launcher.checkpoints.model_files import read_shape
from launcher.checkpoints.model_shape import MODEL_TYPES
from launcher.config.lora import FUSED, MATRICES
from launcher.config.schema import OptimizerConfig
from tests.support import tiny_models
from tests.support.tiny_models import make_groups, make_model, state_of, train, weights

TOKENS = [3, 4, 5, 6, 7, 8]


def policy(folder, **settings):
    given = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0, "optimizer": OptimizerConfig(lr=1e-2), **settings}
    return tiny_models.policy(folder, **given)


SLOW = ("gemma3_text", "llama", "phi3")
OTHERS = [
    pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else pytest.mark.long)
    for kind in MODEL_TYPES
    if kind != "qwen2"
]


@pytest.fixture(scope="module", params=["qwen2", *OTHERS])
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lora") / "model", request.param)


def test_before_the_first_step_servers_get_the_model_bit_for_bit(folder):
    before = policy(folder, use_lora=False, lora_rank=32, lora_alpha=16.0)
    served, unchanged = weights(policy(folder)), weights(before)
    assert served.keys() == unchanged.keys() != set()
    for name, weight in unchanged.items():
        assert torch.equal(served[name], weight), name


def test_only_matrices_with_an_adapter_move(folder):
    model = policy(folder, target_modules=["o_proj", "down_proj"])
    before = weights(model)
    after = weights(train(model))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert moved == {name for name in before if name.endswith(("o_proj.weight", "down_proj.weight"))}
    facts, tensors = state_of(model)
    learning = {name.removeprefix("master.") for name in tensors if name.startswith("master.")}
    assert learning == set(facts["optimizer_steps"])
    assert all("lora_" in name for name in learning)
    count = sum(tensors[f"master.{name}"].numel() for name in learning)
    assert count == read_shape(folder).adapter_parameters(["o_proj", "down_proj"], 4)


def test_what_servers_get_answers_as_the_model_with_its_adapters(folder, tmp_path):
    model = train(policy(folder))
    model.export(tmp_path, torch.float32)
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = served(torch.tensor([TOKENS])).logits[0]
    expected = [logits[at - 1].log_softmax(-1)[TOKENS[at]].item() for at in range(2, len(TOKENS))]
    assert model.logprobs(TOKENS[:2], TOKENS[2:]) == pytest.approx(expected, abs=1e-5)


def test_peft_reads_the_adapters_of_a_checkpoint(folder, tmp_path):
    model = train(policy(folder))
    model.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, (tmp_path / "saved" / ADAPTER_FILE).parent).merge_and_unload()
    for name, weight in weights(model).items():
        torch.testing.assert_close(theirs.state_dict()[name], weight, msg=name)
    names = load_file(tmp_path / "saved" / ADAPTER_FILE).keys()
    assert {stored_name(learned_name(name)) for name in names} == set(names)
    kept = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name for name in kept if "lora" in name} == set(), "SGLang would take them for weights of the model"


@pytest.mark.parametrize("settings", [{}, {"ppo_n_minibatches": 2}], ids=["one step", "two steps a batch"])
def test_a_resume_is_exact(folder, tmp_path, settings):
    whole, half = policy(folder, **settings), policy(folder, **settings)
    train(whole, range(4))
    train(half, range(2)).save(tmp_path / "half")
    resumed = policy(folder, **settings)
    resumed.load(tmp_path / "half")
    for seed in (2, 3):
        resumed.compute_gradients(make_groups(seed=seed))
        resumed.step_ahead()
        resumed.commit()
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(whole).items())


def test_to_begin_anew_is_to_begin(folder):
    model = train(policy(folder))
    model.begin_anew()
    fresh = policy(folder)
    assert all(torch.equal(weight, weights(model)[name]) for name, weight in weights(fresh).items())
    trained = weights(train(model))
    assert all(torch.equal(weight, trained[name]) for name, weight in weights(train(fresh)).items())


def test_in_bfloat16_what_learns_is_float32(folder):
    model = policy(folder, dtype="bfloat16")
    dtypes = {name: parameter.dtype for name, parameter in model._learner.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {torch.bfloat16}
    before = weights(model)
    assert any(not torch.equal(before[name], weight) for name, weight in weights(train(model)).items())


def test_a_state_of_another_rank_or_of_the_whole_model_is_refused(folder, tmp_path):
    train(policy(folder, lora_rank=2)).save(tmp_path / "of rank 2")
    train(policy(folder, use_lora=False, lora_rank=32, lora_alpha=16.0)).save(tmp_path / "whole")
    model = policy(folder)
    before = weights(model)
    for name in ("of rank 2", "whole"):
        with pytest.raises(CheckpointError, match=TENSORS_FILE if name == "of rank 2" else "safetensors"):
            model.load(tmp_path / name)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())


def test_the_adapters_are_on_every_matrix_that_is_not_left_out(folder, tmp_path):
    model = policy(folder)
    model.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {*MATRICES, *FUSED}
    assert config["base_model_name_or_path"] == str(folder)
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
