"""Weights that no training made are not verified, in every type; weights that training moved far are."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.checkpoints import tensor_files
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.trial_folders import find_trial
from launcher.checkpoints.verification import verify
from launcher.checkpoints.weight_distances import distance_of, numbers, tensors_of
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, make_export, name_of

MATRIX, OTHER, BIAS = (f"model.layers.0.self_attn.{name}" for name in ("q_proj.weight", "o_proj.weight", "q_proj.bias"))
STEPS = (20, 40, 60, 80)


def edited(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def exports(tmp_path):
    """As training leaves them: each a little away from the one before it."""
    top = tmp_path / "root" / "checkpoints" / USER / EXPERIMENT / TRIAL / "default"
    make_export(top / str(name_of(STEPS[0])))
    random = torch.Generator().manual_seed(0)
    for before, step in itertools.pairwise(STEPS):
        shutil.copytree(top / str(name_of(before)), top / str(name_of(step)))

        def train(tensors):
            for name in tensors:
                tensors[name] = tensors[name] + 1e-3 * torch.randn(tensors[name].shape, generator=random)

        edited(top / str(name_of(step)), train)
    return top


@pytest.fixture
def verified(exports, tmp_path):
    def one(step):
        catalog = CheckpointCatalog(find_trial(tmp_path / "root", USER, EXPERIMENT, TRIAL), HealthEvidence())
        entry = next(entry for entry in catalog.entries if entry.global_step == step)
        return catalog.verified(entry).verification

    return one


def scaled_by(factor, *names):
    def change(tensors):
        for name in names or tensors:
            tensors[name] = tensors[name] * factor

    return change


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, torch.full_like(tensors[name], value))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(MATRIX, 0.0), f"matrices that are all zero: {MATRIX}"),
        (put(MATRIX, -0.0), f"matrices that are all zero: {MATRIX}"),
        (put(MATRIX, 0.25), f"matrices that are one number throughout: {MATRIX}"),
        (scaled_by(0.0), "matrices that are all zero: "),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_without_content_is_no_weight(exports, change, said, dtype):
    folder = exports / str(name_of(40))
    edited(folder, change)
    edited(folder, lambda tensors: tensors.update({name: one.to(dtype) for name, one in tensors.items()}))
    assert said in verify(folder).why_not


def test_a_bias_of_zeros_and_a_norm_of_ones_are_weights(exports):
    folder = exports / str(name_of(40))
    edited(folder, put(BIAS, 0.0))
    edited(folder, put("model.norm.weight", 1.0))
    assert verify(folder).is_complete


@pytest.mark.parametrize("step", STEPS)
def test_what_training_made_is_near_its_neighbours(verified, step):
    found = verified(step)
    near = {20: "40 and 60", 40: "20 and 60", 60: "40 and 80", 80: "40 and 60"}[step]
    assert found.is_complete
    assert found.checked == ["shapes", "numbers", f"near steps {near}"]


@pytest.mark.parametrize(
    "change",
    [
        scaled_by(1.3),
        scaled_by(0.5, MATRIX),
        lambda tensors: tensors.__setitem__(OTHER, tensors[OTHER].flip(0)),
        lambda tensors: tensors.__setitem__(MATRIX, torch.randn(tensors[MATRIX].shape)),
    ],
)
@pytest.mark.parametrize("step", [60, 80])
def test_what_is_far_from_both_neighbours_is_not_verified(exports, verified, change, step):
    edited(exports / str(name_of(step)), change)
    why = verified(step).why_not
    assert "far from steps 40 and" in why
    assert "something else than training changed it" in why
    assert all(verified(other).is_complete for other in STEPS if other != step), "the others are as they were"


def test_models_that_training_moved_far_are_not_suspected(exports, verified):
    """No two are near each other: nothing shows that one of them is odd."""
    for seed, step in enumerate(STEPS):
        shutil.rmtree(exports / str(name_of(step)))
        make_export(exports / str(name_of(step)), seed=seed)
    assert all(verified(step).is_complete for step in STEPS)


@pytest.mark.parametrize("chunk", [56, 2**22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_figures_are_torchs(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr(tensor_files, "CHUNK", chunk)
    a, update = torch.randn(9, 11).to(dtype), 0.1 * torch.randn(9, 11)
    b = (a + update).to(dtype)
    places = []
    for name, tensor in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file({"w": tensor}, tmp_path / name / "model.safetensors")
        places.append(tensors_of(tmp_path / name)["w"])
    found, a, b = distance_of(*places), a.double(), b.double()
    assert np.concatenate([*numbers(places[0])]).tolist() == a.flatten().tolist()
    assert found.distance == pytest.approx(float((b - a).norm() / a.norm()))
    assert (found.a_norm, found.b_norm) == pytest.approx((float(a.norm()), float(b.norm())))
    cosine = torch.nn.functional.cosine_similarity
    assert found.cosine == pytest.approx(float(cosine(a.flatten(), b.flatten(), dim=0)))
    assert found.update_cosine == pytest.approx(float(cosine(a.flatten(), (b - a).flatten(), dim=0)))
