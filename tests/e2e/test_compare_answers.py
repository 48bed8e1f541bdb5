"""compare_checkpoints --answers: the real SGLang answers held-out prompts with both models."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from scripts.compare_checkpoints import main
from tests.support.real_server import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SETTINGS = ("conf=arithmetic_cpu", "sglang.dtype=float32")


def test_a_model_that_lost_a_layer_answers_worse(tmp_path, capsys):
    """The asset's model has the format, and few right answers: the reward is whether it writes an answer at all.

    Its head, turned round, picks the least likely token; with random numbers in a layer, some models write the format.
    """
    broken = shutil.copytree(MODEL, tmp_path / "epoch0epochstep9globalstep9")
    weights = load_file(MODEL / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name].neg_()
    save_file(weights, broken / "model.safetensors")
    code = main(
        [
            str(MODEL),
            str(broken),
            "--json",
            "--answers",
            "16",
            *SETTINGS,
            "reward.fn=tests.e2e.test_compare_answers:form",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert any("B answers worse: lower rewards on" in one for one in found["against"])
    assert any(name in one for one in found["against"])
    assert {one["a_reward"] for one in found["answers"]["prompts"]} == {1.0}


def form(completion):
    return float("####" in completion)
