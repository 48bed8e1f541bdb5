"""A model saved and loaded goes on bit by bit; a checkpoint that can't be used says why and changes nothing."""

import functools
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.model import learner
from launcher.base.errors import CheckpointError
from tests.support import tiny_models
from tests.support.tiny_models import make_groups, train

policy = functools.partial(tiny_models.policy, temperature=0.8)
BEFORE = Path(__file__).parent / "data" / "checkpoints_before"


def everything(model):
    """Weights, optimizer and counter, to the bit."""
    found = {name: tensor.numpy().tobytes() for name, tensor in model.named_weights(torch.float32)}
    for name, parameter in model._learner.model.named_parameters():
        for key, tensor in model._learner.optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = tensor.numpy().tobytes()
    return found | {"policy_version": model.policy_version}


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_run_cut_in_two_equals_the_run_in_one_piece(folder, tmp_path, dtype, at):
    whole, first, second = (policy(folder, dtype=dtype) for _ in range(3))
    train(whole, range(4))
    train(first, range(at))
    first.save(tmp_path / "checkpoint")
    train(second, [7])  # what it did before must not show
    second.load(tmp_path / "checkpoint")
    assert everything(second) == everything(first)
    train(second, range(at, 4))
    assert everything(second) == everything(whole)
    assert len(everything(whole)) > 4 * len(list(whole.named_weights(torch.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_the_version_before_is_read_as_it_was_written(tmp_path, dtype):
    """Written by the code in which rank 0 gathered all; a long run is upgraded between two attempts."""
    before = BEFORE / dtype
    model = policy(before, dtype=dtype)
    model.load(before)
    assert model.policy_version == 2
    model.save(tmp_path)
    for name in (STATE, MODEL):
        now, then = load_file(tmp_path / name), load_file(before / name)
        assert now.keys() == then.keys()
        assert all(torch.equal(now[key], then[key]) for key in then), name
    assert json.loads((tmp_path / FACTS).read_text()) == json.loads((before / FACTS).read_text())


@pytest.mark.slow
def test_two_runs_alike_are_alike_to_the_bit(folder):
    one, other = policy(folder), policy(folder)
    train(one, range(3))
    train(other, range(3))
    assert everything(one) == everything(other)


def test_random_numbers_go_on_where_they_were(folder, tmp_path):
    model = policy(folder)
    random.gauss(0, 1)  # half a pair is kept inside the generator
    np.random.randn()
    model.save(tmp_path)
    expected = draws()
    draws()
    model.load(tmp_path)
    assert draws() == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_a_model_folder_in_the_actors_dtype(folder, tmp_path, dtype):
    model = policy(folder, dtype=dtype)
    train(model, [0])
    model.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    expected = dict(model.named_weights(getattr(torch, dtype)))
    assert all(torch.equal(dict(loaded.named_parameters())[name], weight) for name, weight in expected.items())
    policy(tmp_path)  # and the next run may start from it


def test_sglang_would_find_no_other_weights_in_it(folder, tmp_path):
    model = policy(folder)
    model.save(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more", "has_room"), [(1, 0, True), (1, -1, False), (2, 0, True), (2, -2, False)])
def test_a_rank_copies_where_its_own_host_has_room(folder, monkeypatch, ranks, more, has_room):
    """It was rank 0's host that was asked for all of them."""
    part = policy(folder)._learner
    part._group.size = ranks
    free = 4 * ranks * part.state_bytes()[1] + 4 * more  # a fourth is taken at most, by each as if all were there
    monkeypatch.setattr(learner, "find_hardware", lambda: SimpleNamespace(memory_free=free))
    assert part.copy_state(0.25) is has_room
    assert (part._copy is not None) is has_room


def test_gradients_are_dropped_by_a_load(folder, tmp_path):
    model = policy(folder)
    model.save(tmp_path)
    model.compute_gradients(make_groups())
    model.load(tmp_path)
    assert all(parameter.grad is None for parameter in model._learner.model.parameters())


def edit_facts(folder, **changes):
    path = folder / "training_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


STATE, FACTS, MODEL = "training_state.tensors", "training_state.json", "model.safetensors"
NORM = "model.norm.weight"

DAMAGE = {
    "no facts": (FACTS, lambda f: (f / FACTS).unlink(), "No such file"),
    "torn facts": (FACTS, lambda f: os.truncate(f / FACTS, 100), "is damaged"),
    "facts of another shape": (FACTS, lambda f: (f / FACTS).write_text("[]"), "is damaged"),
    "a missing fact": (FACTS, lambda f: (f / FACTS).write_text('{"format": "grpo-training-state/1"}'), "is damaged"),
    "another format": (FACTS, lambda f: edit_facts(f, format="theirs/9"), "format 'theirs/9'"),
    "weights from elsewhere": (FACTS, lambda f: edit_facts(f, master_weights="/etc/passwd"), "/etc/passwd"),
    "a damaged generator": (FACTS, lambda f: edit_facts(f, python_random=[3, [1, 2], None]), "is damaged"),
    "a foreign parameter": (FACTS, lambda f: edit_facts(f, optimizer_steps={"x": 1}), "has x, which the model lacks"),
    "no state": (STATE, lambda f: (f / STATE).unlink(), "can't be read"),
    "torn state": (STATE, lambda f: os.truncate(f / STATE, 3000), "is damaged"),
    "empty state": (STATE, lambda f: os.truncate(f / STATE, 0), "is damaged"),
    "a missing moment": (
        STATE,
        lambda f: edit_tensors(f / STATE, lambda t: t.pop(f"exp_avg.{NORM}")),
        rf"lacks exp_avg\.{NORM}",
    ),
    "a damaged torch generator": (
        STATE,
        lambda f: edit_tensors(f / STATE, lambda t: t.update({"random.torch": t["random.torch"][:9].clone()})),
        r"random\.torch",
    ),
    "no weights": (MODEL, lambda f: (f / MODEL).unlink(), "can't be read"),
    "torn weights": (MODEL, lambda f: os.truncate(f / MODEL, 3000), "is damaged"),
    "a missing weight": (MODEL, lambda f: edit_tensors(f / MODEL, lambda t: t.pop(NORM)), f"lacks {NORM}"),
    "rounded weights": (
        MODEL,
        lambda f: edit_tensors(f / MODEL, lambda t: t.update({NORM: t[NORM].bfloat16()})),
        r"BF16 \[16\]",
    ),
    "weights of another model": (
        MODEL,
        lambda f: edit_tensors(f / MODEL, lambda t: t.update({NORM: torch.ones(8)})),
        r"F32 \[8\]",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    model = policy(folder)
    train(model, range(2))
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    model.save(path)
    return path


@pytest.fixture(scope="module")
def elsewhere(folder):
    """A model at another point. Shared: a load that changes it shows in the test that tried it."""
    model = policy(folder)
    train(model, [5])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_names_its_file_and_changes_nothing(checkpoint, elsewhere, tmp_path, name):
    file, damage, reason = DAMAGE[name]
    damaged = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    damage(damaged)
    before, state = everything(elsewhere), (random.getstate(), torch.get_rng_state().tolist())
    with pytest.raises(CheckpointError, match=reason) as caught:
        elsewhere.load(damaged)
    assert str(damaged / file) in str(caught.value)
    assert caught.value.hint
    assert everything(elsewhere) == before
    assert (random.getstate(), torch.get_rng_state().tolist()) == state


@pytest.mark.slow
def test_nothing_saved_is_executed_when_loaded(folder, tmp_path):
    model = policy(folder)
    train(model, [0])
    model.save(tmp_path)
    saved = list(tmp_path.iterdir())
    assert {".json", ".safetensors", ".tensors"} <= {file.suffix for file in saved}
    for file in saved:
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix in {".safetensors", ".tensors"}:
            with safe_open(file, framework="pt") as tensors:
                assert tensors.keys()
        else:
            assert file.suffix == ".jinja"


def test_a_disk_that_takes_nothing_is_a_checkpoint_error(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=f"{blocked / 'checkpoint'} was not written"):
        policy(folder).save(blocked / "checkpoint")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_disk_is_a_checkpoint_error(folder, tiny_disk, dtype):
    model = policy(folder, dtype=dtype)
    (tiny_disk / "ballast").write_bytes(b"\0" * (tiny_disk.free() - 64 * 1024))
    with pytest.raises(CheckpointError, match="was not written"):
        model.save(tiny_disk / "checkpoint")
