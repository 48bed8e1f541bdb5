"""Each way in which a model folder can be bad, and that what is written loads as what it was."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.model import model_folder
from actors.model.stored_tensors import TensorRows
from launcher.base.errors import ConfigError, ModelError
from launcher.checkpoints.manifest import WEIGHTS_FILE
from launcher.checkpoints.model_shape import MODEL_TYPES
from tests.support.tiny_models import make_model

KEY = "actor.path"


def load(folder, **settings):
    return model_folder.load_model(
        folder, **{"dtype": torch.float32, "attn_implementation": "sdpa", "key": KEY, **settings}
    )


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config without a type": (lambda f: (f / "config.json").write_text("{}"), "model_type"),
    "another architecture": (lambda f: edit_config(f, model_type="gpt2"), "a gpt2 model is not supported"),
    "a mixture of experts": (
        lambda f: edit_config(f, model_type="qwen3_moe", num_experts=4),
        "a qwen3_moe model, a mixture of experts, is not supported; others by a trainer that takes them",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "torn weights": (lambda f: os.truncate(f / "model.safetensors", 5000), "could not be loaded"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99), "header too large"),
    "a missing tensor": (
        lambda f: edit_weights(f, lambda w: w.pop("model.norm.weight")),
        r"lacks the weights model\.norm\.weight \(1 in all\)",
    ),
    "a wrong shape": (
        lambda f: edit_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(3)})),
        "could not be loaded",
    ),
    "NaN": (
        lambda f: edit_weights(f, lambda w: w["model.norm.weight"].fill_(float("nan"))),
        r"model\.norm\.weight holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_by_its_path_and_reason(tmp_path, name):
    break_it, reason = BROKEN[name]
    folder = make_model(tmp_path / "model")
    load(folder)
    break_it(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert KEY in caught.value.hint


@pytest.mark.parametrize("path", ["/no/such/model", "./no_such_model", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(path):
    with pytest.raises(ModelError, match=f"there is no folder {path}"):
        model_folder.local_folder(path, key=KEY)


def test_a_hub_name_that_is_not_to_be_had_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="nobody/nothing is no folder here, and could not be had"):
        model_folder.local_folder("nobody/nothing", key=KEY)


@pytest.mark.parametrize("word", ["flash_attention_2", "none_such"])
def test_an_attention_that_is_not_there_names_its_setting(tmp_path, word):
    with pytest.raises((ConfigError, ModelError), match=word):
        load(make_model(tmp_path / "model"), attn_implementation=word)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = make_model(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer: none of .*tokenizer\.json"):
        model_folder.load_tokenizer(folder, key=KEY)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .* could not be loaded"):
        model_folder.load_tokenizer(folder, key=KEY)


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_that_transformers_saves(tmp_path, kind, tied):
    folder = make_model(tmp_path / "model", kind, tie_word_embeddings=tied)
    saved = load_file(folder / "model.safetensors")
    ours = dict(model_folder.named_weights(load(folder)))
    assert ours.keys() == saved.keys()
    assert ("lm_head.weight" in ours) is not tied
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_loads_as_what_it_was(tmp_path, dtype):
    source, copy = make_model(tmp_path / "model"), tmp_path / "copy"
    copy.mkdir()
    weights = dict(model_folder.named_weights(load(source)))
    model_folder.write_side_files(copy, model_folder.read_side_files(source, source), dtype=dtype)
    pieces = {name: TensorRows.of(weight).cast(dtype) for name, weight in weights.items()}
    model_folder.write_weights(copy / WEIGHTS_FILE, pieces)

    loaded = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    assert loaded.dtype == dtype
    written = dict(model_folder.named_weights(loaded))
    assert all(torch.equal(written[name], weight.to(dtype)) for name, weight in weights.items())
    tokenizer = AutoTokenizer.from_pretrained(copy)
    assert tokenizer("1+2=3").input_ids == AutoTokenizer.from_pretrained(source)("1+2=3").input_ids
    assert tokenizer.chat_template
    assert (copy / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_others_may_read_the_weights_as_they_may_the_config(tmp_path):
    source, copy = make_model(tmp_path / "model"), tmp_path / "copy"
    copy.mkdir()
    model_folder.write_side_files(copy, model_folder.read_side_files(source, source), dtype=torch.float32)
    pieces = {name: TensorRows.of(weight) for name, weight in model_folder.named_weights(load(source))}
    model_folder.write_weights(copy / WEIGHTS_FILE, pieces)
    modes = {stat.S_IMODE((copy / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_only_what_belongs_to_the_model_is_carried_over(tmp_path):
    folder = make_model(tmp_path / "model")
    for foreign in ("manifest.json", "training_state.json", "position.json", "model.safetensors.index.json"):
        (folder / foreign).write_text("{}")
    carried = model_folder.read_side_files(folder, folder)
    assert carried.keys() == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
