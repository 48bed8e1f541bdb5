"""The stand-in's log-probs are those of the weights that it holds: as transformers has them, with other weights too."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.truthful_model import TruthfulModel

MODEL = Path(__file__).parents[2] / "assets" / "arithmetic" / "model"
FLOAT32_NOISE = 5e-6
PROMPT = (5, 17, 3, 200, 9)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def transformers_logprobs(folder, prompt, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("length", [1, 2, 60])
def test_they_are_those_of_transformers(folder, length):
    tokens = [(7 * i) % 277 for i in range(length)]
    theirs = transformers_logprobs(folder, PROMPT, tokens)
    assert np.abs(TruthfulModel(folder).logprobs(PROMPT, tokens) - theirs).max() < FLOAT32_NOISE


def test_every_tensor_counts(folder):
    """Each is changed in turn; one that is left out would change nothing."""
    weights = load_file(folder / "model.safetensors")
    tokens = list(range(30, 42))
    before = np.array(TruthfulModel(folder).logprobs(PROMPT, tokens))
    torch.manual_seed(1)
    changed = dict(weights)
    for name, tensor in weights.items():
        other = tensor + 0.1 * torch.randn_like(tensor)
        save_file({**weights, name: other}, folder / "model.safetensors")
        now = np.array(TruthfulModel(folder).logprobs(PROMPT, tokens))
        assert np.abs(now - before).max() > 1e-4, name
        changed[name] = other
    save_file(changed, folder / "model.safetensors")
    theirs = transformers_logprobs(folder, PROMPT, tokens)
    assert np.abs(TruthfulModel(folder).logprobs(PROMPT, tokens) - theirs).max() < FLOAT32_NOISE
