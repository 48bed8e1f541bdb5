"""The stand-in's log-probs are those of the weights that it holds: as transformers has them, with other weights too."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.truthful_model import TruthfulModel

MODEL = Path(__file__).parents[2] / "assets" / "arithmetic" / "model"
SHOWS = 1e-4  # what a changed tensor moves, at the least
PROMPT = (5, 17, 3, 200, 9)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def transformers_logprobs(folder, prompt, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def float32_noise(folder, logprobs, n_positions):
    """How far float32 may be from the exact log-probs, on any processor and in any order of summation.

    Each rounding is off by at most u = 2^-24 of what is rounded, evenly spread: sqrt(u^2 / 3) = u / sqrt(3) in the mean
    square, and as often up as down. N of them one after another add up as a random walk, to u * sqrt(N / 3) of the
    largest number on the way (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019): that
    is the log-prob's own size, of which the logits are (11 of 14 in this model). A sum of n products rounds n times.
    Here N is 2,955 for 65 positions and the bound 2.6e-5; processors were seen at 5.2e-6 and 5.5e-6.
    """
    config = json.loads((folder / "config.json").read_text())
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = width // config["num_attention_heads"]
    norm = width + 4  # the mean square; then epsilon, root, quotient, weight
    attention = width + 4 + head + 1 + 2 * n_positions + 3 + width + 1  # q or k, rotated; scores; shares, mixed; out
    mlp = width + 4 + inner + 1  # gate, its sigmoid and two products; down
    roundings = config["num_hidden_layers"] * (2 * norm + attention + mlp) + norm + width + vocabulary + 2
    noise = 2**-24 * (roundings / 3) ** 0.5 * np.abs(logprobs).max()
    assert noise < SHOWS / 3
    return noise


@pytest.mark.parametrize("length", [1, 2, 60])
def test_they_are_those_of_transformers(folder, length):
    tokens = [(7 * i) % 277 for i in range(length)]
    theirs = transformers_logprobs(folder, PROMPT, tokens)
    apart = np.abs(TruthfulModel(folder).logprobs(PROMPT, tokens) - theirs).max()
    assert apart < float32_noise(folder, theirs, len(PROMPT) + len(tokens))


@pytest.mark.slow
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
        assert np.abs(now - before).max() > SHOWS, name
        changed[name] = other
    save_file(changed, folder / "model.safetensors")
    theirs = transformers_logprobs(folder, PROMPT, tokens)
    apart = np.abs(TruthfulModel(folder).logprobs(PROMPT, tokens) - theirs).max()
    assert apart < float32_noise(folder, theirs, len(PROMPT) + len(tokens))
