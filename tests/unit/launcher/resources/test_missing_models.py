"""A model that is missing, damaged or does not fit the settings is named before anything is started."""

import json
import os
import shutil
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from launcher.base.errors import (
    DataError,
    ModelError,
    UnsupportedModel,
    UnsupportedSetting,
)
from launcher.resources import hub
from tests.support.preflight_parts import missing, the_one

# ── the model ──


def test_no_model_folder(config, tmp_path):
    config.actor.path = config.sglang.model_path = config.tokenizer_path = str(tmp_path / "nowhere")
    assert f"actor.path and sglang.model_path={tmp_path / 'nowhere'} does not exist" in the_one(config, ModelError)


def test_a_model_that_is_a_file(config, model):
    config.actor.path = str(model / "config.json")
    assert "config.json is a file" in the_one(config, ModelError)


def without(name):
    return lambda model: (model / name).unlink()


def with_facts(name, **facts):
    """The file of JSON with these facts in it."""
    return lambda model: (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | facts))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("config.json"), "config.json is missing"),
        (without("tokenizer.json"), "has no tokenizer.json"),
        (without("chat_template.jinja"), "no chat template, so that no prompt can be made of a question\n  → take an"),
        (with_facts("config.json", num_hidden_layers=3), "model.layers.2.input_layernorm.weight"),
        (with_facts("tokenizer.json", added_tokens=[{"id": 5000}]), "has a token 5000, and the model only"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "tokenizer.json holds no vocabulary"),
    ],
)
def test_what_is_missing_in_a_model_or_does_not_fit_is_named(config, model, damage, said):
    damage(model)
    assert said in (told := the_one(config, ModelError))
    assert told.startswith(("actor.path and sglang.model_path", "tokenizer_path")), "its setting is named"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "config.json is not valid JSON"),
        ("[]", "config.json holds a list"),
        ('{"model_type": "qwen2"}', "'num_attention_heads' is missing"),
    ],
)
def test_a_bad_config_json(config, model, text, said):
    (model / "config.json").write_text(text)
    assert said in the_one(config, ModelError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "gpt2"}', "model_type='gpt2'"),
        ('{"hidden_size": 1}', "phi3, qwen2, qwen3; others by a trainer"),
        ('{"model_type": "gpt_oss", "num_local_experts": 32}', "gpt_oss model, a mixture of experts, is not supported"),
        ('{"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}', "which reads images, is not supported"),
        (
            '{"model_type": "gemma3_text", "final_logit_softcapping": 30.0}',
            "a gemma3_text model with final_logit_softcapping is not supported",
        ),
        (
            '{"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.75}}',
            "a phi3 model with partial_rotary_factor in rope_parameters alone is not supported",
        ),
        ('{"model_type": "gemma2"}', "others by a trainer that takes them (AReaL, TRL), under this supervision"),
    ],
)
def test_a_model_that_is_trained_on_no_machine(config, model, text, said):
    (model / "config.json").write_text(text)
    assert said in the_one(config, UnsupportedModel)


def test_no_weights(config, model):
    (model / "model.safetensors").unlink()
    assert "has no model.safetensors" in the_one(config, ModelError)
    (model / "pytorch_model.bin").touch()
    assert "pytorch_model.bin: a pickle, which can run code" in the_one(config, ModelError)


def test_truncated_weights(config, model):
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert f"{file} is truncated" in the_one(config, ModelError)


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"not a safetensors file", struct.pack("<Q", 5) + b"{}}}}", b"\xff" * 64]
)
def test_weights_that_are_none(config, model, content):
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a complete safetensors file" in the_one(config, ModelError)


def test_missing_shards(config, model):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 2 shards are missing: model-00002-of-00002.safetensors" in the_one(config, ModelError)


def test_whole_shards_are_sound(config, model):
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing(config) == []


def test_a_template_that_the_tokenizer_lacks_is_named_with_those_that_it_has(config, model):
    config.chat.template = "my_template.jinja"
    said = the_one(config, ModelError)
    assert f"chat.template=my_template.jinja: there is no file {Path('my_template.jinja').absolute()}\n" in said
    assert f"leave chat.template out for that of the tokenizer in {model}" in said
    config.chat.template = "toolz"
    assert f"chat.template=toolz: no template of the tokenizer in {model} has that name" in the_one(config, ModelError)
    with_facts("tokenizer_config.json", chat_template=[{"name": "tools", "template": "{{ messages }}"}])(model)
    assert "give one of tools, or the path of a .jinja file" in the_one(config, ModelError)
    config.chat.template = "tools"
    assert missing(config) == []


def test_a_chat_template_in_the_tokenizers_settings_is_one(config, model):
    (model / "chat_template.jinja").unlink()
    with_facts("tokenizer_config.json", chat_template="{{ messages }}")(model)
    assert missing(config) == []


def test_a_server_that_starts_from_another_model(config, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    config.sglang.model_path = str(other)
    assert missing(config) == []
    with_facts("config.json", intermediate_size=1)(other)
    assert f"sglang.model_path={other} is of another shape than actor.path={model}" in the_one(
        config, UnsupportedSetting
    )


def test_a_reference_is_looked_at_only_where_it_is_used(config, tmp_path):
    config.ref.path = str(tmp_path / "reference")
    assert missing(config) == []
    config.actor.kl_ctl = 0.1
    assert "ref.path" in the_one(config, ModelError)


def test_sequences_longer_than_the_model_knows(config, model):
    with_facts("config.json", max_position_embeddings=128)(model)
    config.sglang.context_length = 256
    assert "sglang.context_length: sequences of 256 tokens" in the_one(config, UnsupportedSetting)


def test_adapters_on_matrices_that_the_model_has_fused(config):
    config.actor.use_lora = True
    config.actor.target_modules = ["o_proj", "qkv_proj"]
    assert "has no qkv_proj" in the_one(config, UnsupportedSetting)


@pytest.mark.parametrize(("matrices", "most"), [([], 128), (["k_proj", "v_proj"], 64)])
def test_an_adapter_has_no_larger_rank_than_the_largest_matrix_beside_one(config, matrices, most):
    config.actor.use_lora = True
    config.actor.target_modules = matrices
    config.actor.lora_rank = most
    assert missing(config) == []
    config.actor.lora_rank = most + 1
    assert f"actor.lora_rank={most + 1}: of the matrices of {config.actor.path} that get an adapter none has a " in (
        said := the_one(config, UnsupportedSetting)
    )
    assert f"at most {most}; " in said
    config.actor.use_lora = False
    assert missing(config) == []


def test_heads_that_tp_size_does_not_divide(config):
    config.sglang.tp_size = 3
    assert "sglang.tp_size=3 does not divide the 4 heads" in the_one(config, UnsupportedSetting)


# ── the hub ──


def test_hub_names_and_paths():
    assert all(map(hub.is_hub_name, ["gpt2", "Qwen/Qwen2.5-1.5B-Instruct", "openai/gsm8k"]))
    assert not any(
        map(hub.is_hub_name, ["/a/b", "./a", "../a", "~/a", "a/b/c", "data.jsonl", "a/train.parquet", "", "a/"])
    )


def test_not_in_the_cache_and_offline(config, empty_cache):
    config.actor.path = config.sglang.model_path = config.tokenizer_path = "some/model"
    config.train_dataset.path = config.valid_dataset.path = "openai/gsm8k"
    model, data = missing(config)
    assert "actor.path and sglang.model_path=some/model is not on this machine" in str(model)
    assert "hf download some/model" in model.hint
    assert "train_dataset.path and valid_dataset.path=openai/gsm8k is not on this machine" in str(data)
    assert (type(model), type(data)) == (ModelError, DataError)


def test_what_is_in_the_cache_is_there(config, model, empty_cache):
    repository = empty_cache / "hub/models--some--model"
    snapshot = repository / "snapshots/abc"
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    (empty_cache / "datasets/openai___gsm8k/main").mkdir(parents=True)
    config.actor.path = config.sglang.model_path = config.tokenizer_path = "some/model"
    config.train_dataset.path = "openai/gsm8k"
    assert missing(config) == []
    (snapshot / "model.safetensors").unlink()
    assert "has no model.safetensors" in the_one(config, ModelError)


@contextmanager
def hub_that_answers(status: int):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"id": "some/model", "modelId": "some/model"}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "said"), [(200, ""), (404, "the hub refuses"), (503, "the hub refuses")])
def test_the_hub_is_asked_once_for_its_answer_alone(empty_cache, monkeypatch, status, said):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_that_answers(status) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        answer = hub.why_unavailable("some/model", kind="model")
    assert answer.startswith(said)
    assert bool(answer) == bool(said)
    assert not empty_cache.exists()


def test_a_hub_that_never_answers_does_not_hold_up(empty_cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        answer = hub.why_unavailable("some/model", kind="model")
    assert "did not answer within" in answer
