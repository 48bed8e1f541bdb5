"""The thorough proof: forty whole checkpoints pass, forty damaged ones don't, and each says by which file."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.base.errors import CheckpointError, ModelError
from launcher.checkpoints import tensor_files, verification
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.manifest import find_faults
from launcher.checkpoints.model_files import read_shape
from launcher.checkpoints.model_shape import FAMILIES
from launcher.checkpoints.tensor_files import nonfinite, read_entries
from launcher.checkpoints.verification import Identity, verify
from tests.support.checkpoint_makers import (
    EXPERIMENT,
    TRIAL,
    edit_json,
    edit_tensors,
    flip,
    learned,
    make_export,
    name_of,
    reseal,
    save,
    truncate,
)
from tests.support.tiny_models import make_model

IDENTITY = Identity(experiment_name=EXPERIMENT, trial_name=TRIAL)
NORM, MATRIX = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
NAN, INFINITY = float("nan"), float("inf")
FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "training_state.tensors",
    "training_state.json",
    "position.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One in float32 and one in bfloat16, with master weights of its own."""
    root = tmp_path_factory.mktemp("whole")
    store = CheckpointStore(root / "default")
    save(store, learned(root / "model", seed=1), 7)
    save(store, learned(root / "model16", seed=2, dtype="bfloat16"), 8)
    return store


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole.find(7).path, tmp_path / str(name_of(7)))


@pytest.fixture
def checkpoint16(whole, tmp_path):
    return shutil.copytree(whole.find(8).path, tmp_path / str(name_of(8)))


def fill(name, value):
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def drop(name):
    return lambda tensors: tensors.pop(name)


def tensors(file, change):
    return lambda folder: edit_tensors(folder, file, change)


def edit(file, change):
    return lambda folder: edit_json(folder, file, change)


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def cut_manifest(folder):
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[: len(text) // 2])


def of_another_run(folder):
    reseal(folder, config_fingerprint={"experiment_name": "another", "trial_name": TRIAL})


def without(file):
    def change(folder):
        (folder / file).unlink()
        reseal(folder)

    return change


MODEL, STATE, FACTS, POSITION = "model.safetensors", "training_state.tensors", "training_state.json", "position.json"

DAMAGE = {
    **{f"cut short: {file}": (lambda folder, file=file: truncate(folder / file), file) for file in FILES},
    **{f"a bit flipped: {file}": (lambda folder, file=file: flip(folder / file), file) for file in FILES},
    **{f"missing: {file}": (lambda folder, file=file: (folder / file).unlink(), file) for file in FILES},
    "empty folder": (emptied, "is empty"),
    "half a manifest": (cut_manifest, "manifest.json"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "manifest of another run": (of_another_run, "experiment_name is 'another'"),
    "manifest of another step": (lambda folder: reseal(folder, global_step=6), "of step 6"),
    "a matrix of another shape": (tensors(MODEL, put(MATRIX, torch.zeros(16, 8))), MATRIX),
    "a norm too long": (tensors(MODEL, put(NORM, torch.ones(17))), NORM),
    "a tensor missing": (tensors(MODEL, drop(NORM)), NORM),
    "a tensor too many": (tensors(MODEL, put("model.extra.weight", torch.ones(2))), "model.extra.weight"),
    "NaN in the weights": (tensors(MODEL, fill(NORM, NAN)), MODEL),
    "infinity in the weights": (tensors(MODEL, fill(MATRIX, -INFINITY)), MODEL),
    "NaN in a moment": (tensors(STATE, fill(f"exp_avg.{NORM}", NAN)), STATE),
    "infinity in a moment": (tensors(STATE, fill(f"exp_avg_sq.{MATRIX}", INFINITY)), STATE),
    "a moment of another shape": (tensors(STATE, put(f"exp_avg.{NORM}", torch.ones(3))), STATE),
    "a moment in half precision": (tensors(STATE, put(f"exp_avg.{NORM}", torch.ones(16).half())), STATE),
    "a moment missing": (tensors(STATE, drop(f"exp_avg_sq.{NORM}")), STATE),
    "no random state": (tensors(STATE, drop("random.torch")), "random.torch"),
    "no optimizer": (without(STATE), STATE),
    "no data position": (without(POSITION), POSITION),
    "position of another step": (edit(POSITION, lambda c: c["position"].update(next_step=7)), POSITION),
    "position without a queue": (edit(POSITION, lambda c: c.pop("queue")), POSITION),
    "an optimizer without steps": (edit(FACTS, lambda c: c.update(optimizer_steps={})), FACTS),
    "a broken random state": (edit(FACTS, lambda c: c.update(python_random=[3, [1, 2], None])), FACTS),
    "facts of another version": (edit(FACTS, lambda c: c.update(policy_version=3)), FACTS),
    "config.json of a larger model": (edit("config.json", lambda c: c.update(hidden_size=32)), "config.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_names_itself(checkpoint, name):
    damage, told = DAMAGE[name]
    assert verify(checkpoint, identity=IDENTITY).is_complete
    damage(checkpoint)
    proof = verify(checkpoint, identity=IDENTITY)
    assert not proof.is_complete
    assert re.search(re.escape(told), proof.why_not), proof.why_not


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_forty_whole_ones_are_not_refused(tmp_path, kind, dtype):
    """Three architectures, two precisions, heads tied and not, seven steps each: 42."""
    store = CheckpointStore(tmp_path / "default")
    for seed in range(7):
        bias = {"attention_bias": True, "mlp_bias": True} if kind == "llama" and seed % 2 else {}
        tied = seed % 3 == 0
        model = learned(tmp_path / f"m{seed}", kind, dtype=dtype, seed=seed, tie_word_embeddings=tied, **bias)
        proof = verify(save(store, model, seed).path, identity=IDENTITY)
        assert proof.is_complete, proof.why_not
        model.load(proof.folder)


def test_what_is_proven_loads_and_what_does_not_load_is_not_proven(checkpoint, whole, tmp_path):
    """The proof is without torch; this is the loader that it speaks for."""
    model = learned(tmp_path / "model", seed=1)
    model.load(checkpoint)
    edit_tensors(checkpoint, STATE, drop(f"exp_avg.{NORM}"))
    with pytest.raises(CheckpointError):
        model.load(checkpoint)
    assert not verify(checkpoint).is_complete


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_bfloat16_and_its_masters_are_looked_into(checkpoint16, value):
    assert verify(checkpoint16).is_complete
    weights = load_file(checkpoint16 / MODEL)
    assert weights[NORM].dtype is torch.bfloat16
    edit_tensors(checkpoint16, MODEL, fill(NORM, value))
    assert f"{MODEL} holds numbers that are not finite, in {NORM}" in verify(checkpoint16).why_not


def test_a_nan_in_the_masters_of_bfloat16(checkpoint16):
    edit_tensors(checkpoint16, STATE, fill(f"master.{NORM}", NAN))
    assert f"{STATE} holds numbers that are not finite, in master.{NORM}" in verify(checkpoint16).why_not


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_finite_numbers_of_every_type_pass_and_nan_does_not(tmp_path, dtype):
    """All that a type can hold, against torch's own word."""
    bits = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize)
    if bits is None:
        numbers = torch.cat([torch.randn(999), torch.tensor([0.0, 1e-38, 3e38])]).to(dtype)
    else:
        numbers = torch.arange(256**dtype.itemsize).to(torch.int64).to(bits).view(dtype)
    finite = numbers.double().isfinite() if dtype.itemsize > 1 else numbers.float().isfinite()
    file = tmp_path / "x.safetensors"
    save_file({"finite": numbers[finite].contiguous(), "nan": torch.full((5,), NAN).to(dtype)}, file)
    assert nonfinite(file, read_entries(file)) == ["nan"]
    if bits is not None:
        for strange in numbers[~finite]:
            save_file({"x": strange.reshape(1).contiguous()}, file)
            assert nonfinite(file, read_entries(file)) == ["x"]


def test_a_large_tensor_is_read_in_portions(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK", 1001)  # no multiple of any width
    file = tmp_path / "x.safetensors"
    tensor = torch.zeros(5000)
    save_file({"x": tensor}, file)
    assert nonfinite(file, read_entries(file)) == []
    tensor[-1] = NAN
    save_file({"x": tensor}, file)
    assert nonfinite(file, read_entries(file)) == ["x"]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_expected_shapes_are_those_that_transformers_writes(tmp_path, kind, tied):
    bias = {name: True for name in ("attention_bias", "mlp_bias") if getattr(FAMILIES[kind], name)}
    folder = make_model(tmp_path / "model", kind, tie_word_embeddings=tied, **bias)
    written = {name: tuple(entry.shape) for name, entry in read_entries(folder / MODEL).items()}
    assert read_shape(folder).tensors() == written


# ── exports, which nobody vouches for ──


EXPORT_DAMAGE = {
    "no tokenizer": (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
    "cut tokenizer": (lambda f: truncate(f / "tokenizer.json"), "tokenizer.json is not valid JSON"),
    "cut weights": (lambda f: truncate(f / MODEL), MODEL),
    "no weights": (lambda f: (f / MODEL).unlink(), MODEL),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "empty": (emptied, "is empty"),
    "gone": (shutil.rmtree, "is no folder"),
    "a pickle": (lambda f: (f / MODEL).rename(f / "pytorch_model.bin"), "pickle"),
}


@pytest.mark.parametrize("name", EXPORT_DAMAGE)
def test_a_damaged_export_names_itself(tmp_path, name):
    damage, told = EXPORT_DAMAGE[name]
    folder = make_export(tmp_path / str(name_of(3)))
    assert verify(folder).is_complete
    damage(folder)
    assert told in verify(folder).why_not


def test_a_missing_shard_and_a_tensor_that_only_the_index_knows(tmp_path):
    folder = make_export(tmp_path / "export")
    weights = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verify(folder).is_complete
    save_file({name: weights[name] for name in names[5:-1]}, folder / "model-00002-of-00002.safetensors")
    assert names[-1] in verify(folder).why_not
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 shards are missing: model-00002-of-00002" in verify(folder).why_not


def test_an_unknown_architecture_is_said_and_not_healthy(tmp_path):
    folder = make_export(tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma9"}))
    proof = verify(folder)
    assert (proof.problems, proof.is_complete) == ([], False)
    assert proof.unknown == ["unknown architecture 'gemma9': shapes were not checked"]


def test_an_unknown_number_type_is_said(tmp_path):
    folder = make_export(tmp_path / "export")
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"F99"'))
    assert not verify(folder).is_complete


def test_a_header_that_claims_the_impossible(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(np.uint64(2**60).tobytes() + b"{}")
    with pytest.raises(ModelError, match=r"x\.safetensors is not a complete safetensors file"):
        read_entries(file)
    for header in (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"[]", b'{"a":1}'):
        file.write_bytes(np.uint64(len(header)).tobytes() + header + b"\0" * 4)
        with pytest.raises(ModelError, match=r"x\.safetensors is not a complete safetensors file"):
            read_entries(file)


def test_one_that_a_live_run_moves_while_it_is_read_was_not_damaged(checkpoint, monkeypatch):
    def moved(folder, files):
        folder.rename(folder.with_name("elsewhere"))
        return find_faults(folder, files)

    monkeypatch.setattr(verification, "find_faults", moved)
    assert verify(checkpoint).why_not == f"{checkpoint} was moved or removed while it was read"
