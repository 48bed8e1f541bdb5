"""compare_checkpoints: what training does is close, what it does not is named, and no more is said."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.checkpoints.answers import Answer, Answers
from scripts.compare_checkpoints import main
from tests.support.checkpoint_makers import make_export, name_of

MATRIX, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


def model(folder, before=None, *, change=lambda tensors: None, move=1e-3, dtype=torch.bfloat16, seed=0):
    """`before` after a little training, then changed; sound where nothing changes it."""
    make_export(folder)
    source = load_file((before or folder) / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: one.float() + (move * torch.randn(one.shape, generator=random) if before else 0)
        for name, one in source.items()
    }
    change(tensors)
    save_file({name: one.to(dtype).contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def before(tmp_path):
    return model(tmp_path / str(name_of(187)), dtype=torch.float32)


@pytest.fixture
def tool(capsys):
    def run(*words):
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out if "--json" in words else out + err

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_training_does_is_close(tmp_path, before, tool, dtype):
    after = model(tmp_path / str(name_of(189)), before, dtype=dtype)
    code, said = tool(before, after)
    assert code == 0
    assert "CLOSE: all of it 0.00" in said
    assert "(how it answers: --answers)" in said
    assert "healthy" not in said, "weights alone do not show that"
    assert "sound" not in said, "weights alone do not show that"


def test_the_same_is_equal(tmp_path, before, tool):
    after = shutil.copytree(before, tmp_path / str(name_of(189)))
    code, said = tool(before, after)
    assert code == 0
    assert "EQUAL: every number of 26 tensors is the same" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors[MATRIX].zero_(), f"matrices that are all zero: {MATRIX}"),
        (lambda tensors: tensors[MATRIX].view(-1)[7:8].fill_(float("nan")), f"not finite, in {MATRIX}"),
        (lambda tensors: tensors[MATRIX].mul_(1.5), f"{MATRIX} is A's times 1.5"),
        (lambda tensors: [one.mul_(0.5) for one in tensors.values()], "more, of 26 tensors"),
        (lambda tensors: tensors[MATRIX].copy_(tensors[MATRIX].flip(0)), f"{MATRIX}: up to 1"),
    ],
)
def test_what_training_does_not_is_named(tmp_path, before, tool, change, said):
    after = model(tmp_path / str(name_of(189)), before, change=change)
    code, found = tool(before, after)
    assert code == 1, found
    assert "SOMETHING ELSE THAN TRAINING" in found, found
    assert said in found.replace("\n", " "), found


def test_other_models_are_far_apart_and_nothing_is_concluded(tmp_path, before, tool):
    code, said = tool(before, make_export(tmp_path / str(name_of(189)), seed=5))
    assert code == 0
    assert "FAR APART" in said
    assert "not near enough that the weights could show" in said


def test_the_direction_of_the_update(tmp_path, before, tool):
    step = {name: 1e-2 * torch.randn(one.shape) for name, one in load_file(before / "model.safetensors").items()}

    def moved(tensors):
        for name, one in tensors.items():
            one.add_(step[name])

    middle = model(tmp_path / str(name_of(188)), before, change=moved, move=0, dtype=torch.float32)
    after = model(tmp_path / str(name_of(189)), middle, change=moved, move=0, dtype=torch.float32)
    code, said = tool(middle, after, "--base", before, "--json")
    facts = json.loads(said)
    assert code == 0
    assert all(one["earlier_cosine"] == pytest.approx(1.0, abs=1e-3) for one in facts["tensors"])
    assert [one["name"] for one in facts["tensors"] if one["name"] == MATRIX] == [MATRIX]


def test_what_only_one_of_them_has_is_said(tmp_path, before, tool):
    after = model(tmp_path / str(name_of(189)), before, change=lambda tensors: tensors.pop(BIAS))
    code, said = tool(before, after)
    assert f"not looked at: only in A: {BIAS}" in said
    assert code == 1
    assert "lacks tensors" in said


def test_what_is_no_model_is_named(tmp_path, before, tool):
    (tmp_path / "empty").mkdir()
    code, said = tool(before, tmp_path / "empty")
    assert code == 2
    assert f"{tmp_path / 'empty'} has no model.safetensors" in said
    code, said = tool(before, before, "--answers", "4")
    assert code == 2
    assert "--answers K and the run's settings belong together" in said


@pytest.mark.parametrize(
    ("b", "against"), [([0.0] * 8, True), ([1.0] * 7 + [0.0], False), ([1.0, 0, 1, 0, 1, 0, 1, 1], False)]
)
def test_worse_is_said_where_chance_hardly_does_it(b, against):
    a = tuple(Answer(text="a", reward=1.0) for _ in b)
    found = Answers(questions=("?",) * len(b), a=a, b=tuple(Answer(text="b", reward=one) for one in b))
    assert bool(found.against) is against
    unscored = Answers(questions=("?",) * len(b), a=a, b=tuple(Answer(text="b", reward=None) for _ in b))
    assert not unscored.against
    assert unscored.sentence() == "no answer could be scored"
