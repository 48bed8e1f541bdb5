"""check_weights asks the real SGLang, in float32 and in bfloat16, whether it holds the weights of a folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.config.schema import OptimizerConfig
from scripts.check_weights import main
from tests.support.real_server import MODEL, Serving
from tests.support.tiny_models import policy, train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SAME, OTHER, UNKNOWN = 0, 1, 2
EXACT, ROUNDED = "float32", "bfloat16"


@pytest.fixture(scope="module", params=[EXACT, ROUNDED])
def serving(tmp_path_factory, request):
    serving = Serving(tmp_path_factory.mktemp("serving"), dtype=request.param)
    serving.dtype = request.param
    serving.start()
    yield serving
    serving.run(lambda _: serving.server.close())
    serving.loop.close()


@pytest.fixture
def asked(serving, capsys):
    """The exit code of the command on a folder, and what it prints as JSON."""

    def asked(folder, *more):
        words = [serving.url, str(folder), "--api-key-file", str(serving.keys.parent / "api_key"), "--json", *more]
        return main(words), json.loads(capsys.readouterr().out)

    return asked


def changed(folder, name, change):
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def trained(folder, *, lr, steps):
    """As many steps of AdamW, each of which moves each weight by about the learning rate."""
    folder.mkdir()
    optimizer = OptimizerConfig(lr=lr, warmup_steps=0, lr_scheduler_type="constant")
    train(policy(MODEL, optimizer=optimizer), range(steps)).export(folder, torch.float32)
    return folder


def test_the_same_weights(serving, asked, tmp_path):
    code, found = asked(MODEL)
    assert code == SAME, found["reason"]
    assert f"rounding in {serving.dtype} explains" in found["reason"]
    assert found["weight_version"] == "3"
    assert 0 < found["distance"] < found["limit"] < (1.1e-5 if serving.dtype == EXACT else 0.02)
    (tmp_path / "prompts").write_text("4+5+4=\n" * 16)
    code, found = asked(MODEL, "--prompts", str(tmp_path / "prompts"))
    assert code == SAME, found["reason"]


def test_one_matrix_of_one_layer_is_another(asked, tmp_path):
    def turned(matrix):
        return matrix[torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))]

    code, found = asked(changed(tmp_path / "model", "model.layers.0.mlp.down_proj.weight", turned))
    assert code == OTHER, found["reason"]


def test_a_step_shows_in_float32_and_twenty_in_bfloat16(serving, asked, tmp_path):
    """In bfloat16 one step of this size is between what rounding usually makes and what it never makes."""
    lr, steps = (1e-5, 1) if serving.dtype == EXACT else (3e-4, 20)
    code, found = asked(trained(tmp_path / "model", lr=lr, steps=steps))
    assert code == OTHER, found


def test_a_folder_with_more_tokens_is_not_compared_and_does_not_end_the_server(serving, asked, tmp_path):
    name = "model.embed_tokens.weight"
    folder = changed(tmp_path / "model", name, lambda matrix: matrix.repeat(4, 1)[:1000])
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"vocab_size": 1000}))
    code, found = asked(folder)
    assert code == UNKNOWN
    assert "out-of-vocabulary token id 999" in found["reason"]
    assert asked(MODEL)[0] == SAME
