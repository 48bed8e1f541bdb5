"""Each thing a machine or a folder can lack: found before anything is started, named, and nothing left behind."""

import copy
import json
import os
import re
import shutil
import socket
import struct
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from launcher.base.errors import (
    ConfigError,
    DataError,
    ModelError,
    ResourceError,
    RewardImportError,
    StorageError,
    UsageError,
)
from launcher.config.compose import REPOSITORY, compose
from launcher.resources import hub
from launcher.resources.hardware import Gpu, Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_files import find_shape
from launcher.resources.missing_machine import nearest_existing
from launcher.resources.preflight import find_missing, preflight
from launcher.resources.run_plan import make_plan

ARITHMETIC = compose(["conf=arithmetic_cpu"])
MACHINE = Hardware(gpus=(), cpus=2, memory=24 * GIB, memory_free=20 * GIB, no_gpu="NVML finds no driver")
WITH_GPU = replace(MACHINE, gpus=(Gpu(name="NVIDIA H200", memory=140 * GIB, free=139 * GIB),), no_gpu="")


@pytest.fixture
def model(tmp_path):
    """A copy of the shipped model, to be damaged."""
    return Path(shutil.copytree(REPOSITORY / "assets/arithmetic/model", tmp_path / "model"))


@pytest.fixture
def config(tmp_path, model):
    """A run that lacks nothing here, but for what a test takes away."""
    own = copy.deepcopy(ARITHMETIC)
    own.actor.path = own.sglang.model_path = own.tokenizer_path = own.ref.path = str(model)
    own.cluster.fileroot = str(tmp_path / "runs")
    own.reward.fn = "builtins:dict"  # imported in no time
    return own


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A Hugging Face cache of this test's own, and no network."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache / "datasets"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.why_unavailable.cache_clear()
    yield cache
    hub.why_unavailable.cache_clear()


def missing(config, hardware=MACHINE) -> list[UsageError]:
    return find_missing(config, hardware, make_plan(config, hardware, find_shape(config)))


def the_one(config, kind, hardware=MACHINE) -> str:
    found = missing(config, hardware)
    assert [type(error) for error in found] == [kind], [str(error) for error in found]
    assert found[0].hint
    return str(found[0])


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_nothing_is_missing_and_nothing_was_made(config, tmp_path):
    before = tree(tmp_path)
    preflight(config, MACHINE, make_plan(config, MACHINE, find_shape(config)))
    assert tree(tmp_path) == before


# ── the model ──


def test_no_model_folder(config, tmp_path):
    config.actor.path = config.sglang.model_path = config.tokenizer_path = str(tmp_path / "nowhere")
    assert f"actor.path and sglang.model_path={tmp_path / 'nowhere'} does not exist" in the_one(config, ModelError)


def test_a_model_that_is_a_file(config, model):
    config.actor.path = str(model / "config.json")
    assert "config.json is a file" in the_one(config, ModelError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "config.json is not valid JSON"),
        ("[]", "config.json holds a list"),
        ('{"model_type": "gpt2"}', "model_type='gpt2'"),
        ('{"hidden_size": 1}', "supported: llama, qwen2, qwen3"),
        ('{"model_type": "qwen2"}', "'num_attention_heads' is missing"),
    ],
)
def test_a_bad_config_json(config, model, text, said):
    (model / "config.json").write_text(text)
    assert said in the_one(config, ModelError)


def test_no_config_json(config, model):
    (model / "config.json").unlink()
    assert "config.json is missing" in the_one(config, ModelError)


def test_no_weights(config, model):
    (model / "model.safetensors").unlink()
    assert "has no model.safetensors" in the_one(config, ModelError)
    (model / "pytorch_model.bin").touch()
    assert "pytorch_model.bin: a pickle, which can run code" in the_one(config, ModelError)


def test_truncated_weights(config, model):
    file = model / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    message = the_one(config, ModelError)
    assert f"{file} is truncated: {whole - 1} bytes instead of the {whole}" in message


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"not a safetensors file", struct.pack("<Q", 5) + b"{}}}}", b"\xff" * 64]
)
def test_weights_that_are_none(config, model, content):
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a complete safetensors file" in the_one(config, ModelError)


def test_missing_tensors(config, model):
    facts = json.loads((model / "config.json").read_text())
    facts["num_hidden_layers"] += 1
    (model / "config.json").write_text(json.dumps(facts))
    assert f"model.layers.{facts['num_hidden_layers'] - 1}.input_layernorm.weight" in the_one(config, ModelError)


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


def test_no_tokenizer(config, model):
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in the_one(config, ModelError)


def test_no_chat_template(config, model):
    (model / "chat_template.jinja").unlink()
    message = the_one(config, ModelError)
    assert "no chat template" in message
    assert "tokenizer_path" in message


def test_a_chat_template_in_the_tokenizers_settings_is_one(config, model):
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert missing(config) == []


def test_a_tokenizer_of_another_family(config, model):
    facts = json.loads((model / "tokenizer.json").read_text())
    facts["added_tokens"].append(facts["added_tokens"][-1] | {"id": 5000, "content": "<new>"})
    (model / "tokenizer.json").write_text(json.dumps(facts))
    assert "has a token 5000, and the model only" in the_one(config, ModelError)


def test_a_tokenizer_without_a_vocabulary(config, model):
    (model / "tokenizer.json").write_text("{}")
    assert "tokenizer.json holds no vocabulary" in the_one(config, ModelError)


def test_a_server_that_starts_from_another_model(config, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    config.sglang.model_path = str(other)
    assert missing(config) == []
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(facts | {"intermediate_size": 1}))
    assert f"sglang.model_path={other} is of another shape than actor.path={model}" in the_one(config, ConfigError)


def test_a_reference_is_looked_at_only_where_it_is_used(config, tmp_path):
    config.ref.path = str(tmp_path / "reference")
    assert missing(config) == []
    config.actor.kl_ctl = 0.1
    assert "ref.path" in the_one(config, ModelError)


def test_sequences_longer_than_the_model_knows(config, model):
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 128}))
    config.sglang.context_length = 256
    assert "sglang.context_length: sequences of 256 tokens" in the_one(config, ConfigError)


def test_heads_that_tp_size_does_not_divide(config):
    config.sglang.tp_size = 3
    assert "sglang.tp_size=3 does not divide the 4 heads" in the_one(config, ConfigError)


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
    assert "did not answer within" in answer or "can't be reached" in answer


# ── data and reward ──


def test_no_data_set(config, tmp_path):
    config.train_dataset.path = str(tmp_path / "train.jsonl")
    assert f"train_dataset.path={tmp_path / 'train.jsonl'} does not exist" in the_one(config, DataError)


def test_an_empty_data_set(config, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    config.valid_dataset.path = str(tmp_path / "empty.jsonl")
    assert "valid_dataset.path=" in the_one(config, DataError)
    (tmp_path / "folder").mkdir()
    config.valid_dataset.path = str(tmp_path / "folder")
    assert "holds no records" in the_one(config, DataError)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "there is no module 'my_reward'"),
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("import os; os._exit(4)", "ended the process with exit code 4"),
        ("def other(): ...", "no 'score'"),
        ("score = 3", "is a int, not a function"),
        ("def score(text): ...", "can't be called"),
    ],
)
def test_a_reward_function_that_cannot_be_used(config, tmp_path, monkeypatch, module, said):
    monkeypatch.syspath_prepend(tmp_path)
    if module is not None:
        (tmp_path / "my_reward.py").write_text(module)
    config.reward.fn = "my_reward:score"
    message = the_one(config, RewardImportError)
    assert "my_reward:score" in message
    assert said in message


def test_the_default_reward_function(config):
    config.reward.fn = ARITHMETIC.reward.fn
    assert missing(config) == []


def test_a_reward_function_of_the_users_own(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text("print('loud')\ndef score(*, completion, **rest): return 0.0")
    config.reward.fn = "my_reward:score"
    assert missing(config) == []


# ── the machine ──


def test_a_gpu_is_asked_for_and_there_is_none(config):
    config.sglang.device = config.actor.device = "cuda"
    message = the_one(config, ResourceError)
    assert re.match(
        r"a GPU with \d+ GiB of memory: sglang.device=cuda and actor.device=cuda, but NVML finds no", message
    )


def test_fewer_gpus_than_are_booked(config):
    config.sglang.device = config.actor.device = "cuda"
    config.sglang.n_servers = 2
    assert "GPUs: 3 are booked and 1 found" in the_one(config, ResourceError, WITH_GPU)


def test_too_little_memory_on_the_gpu(config):
    config.sglang.device = config.actor.device = "cuda"
    config.sglang.gpu_fraction = config.actor.gpu_fraction = 0.5
    assert missing(config, WITH_GPU) == []
    config.sglang.mem_fraction_static, config.sglang.max_total_tokens = 0.99, None
    assert "memory: GPU 0 (NVIDIA H200): " in the_one(config, ResourceError, WITH_GPU)


def test_too_little_memory_on_the_host(config):
    message = the_one(config, ResourceError, replace(MACHINE, memory=2 * GIB))
    assert "host memory" in message
    assert "2.0 GiB are there" in message


def test_a_server_that_falls_back_to_the_cpu_needs_a_token_pool(config):
    config.sglang.device, config.sglang.max_total_tokens = "auto", None
    assert "sglang.max_total_tokens=null" in the_one(config, ConfigError)


def test_fileroot_cannot_be_written(config, tmp_path):
    if os.geteuid() == 0:  # whom no permission stops
        config.cluster.fileroot = "/proc/runs/grpo"
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        config.cluster.fileroot = str(tmp_path / "locked/grpo")
    assert f"cluster.fileroot={config.cluster.fileroot} can't be written" in the_one(config, StorageError)


def test_fileroot_below_a_file(config, tmp_path):
    (tmp_path / "file").touch()
    config.cluster.fileroot = str(tmp_path / "file/grpo")
    assert "is a file" in the_one(config, StorageError)


def test_a_disk_that_is_too_small(config, tiny_disk):
    config.cluster.fileroot = str(tiny_disk / "runs")
    message = the_one(config, ResourceError)
    assert f"cluster.fileroot={tiny_disk / 'runs'}: 2 checkpoints need" in message
    assert not (tiny_disk / "runs").exists()


def test_memory_backed_storage_that_is_too_small(config):
    plan = replace(make_plan(config, MACHINE, find_shape(config)), weight_files_bytes=2**60)
    (error,) = find_missing(config, MACHINE, plan)
    assert "/dev/shm: weights on their way to the servers" in str(error)
    assert "actor.weight_update_mode=tensor" in error.hint


def test_room_is_asked_for_where_the_folder_will_be(tmp_path):
    assert nearest_existing(tmp_path / "a/b/c") == tmp_path


def test_a_port_in_use(config):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config.sglang.port = listener.getsockname()[1]
        message = the_one(config, ResourceError)
    assert f"sglang.port={config.sglang.port} on 127.0.0.1: Address already in use" in message
    assert missing(config) == []


def test_the_second_servers_port_counts_too(config):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        config.sglang.n_servers, config.sglang.port = 2, taken - 1
        assert f"sglang.port={taken}" in "".join(map(str, missing(config)))


def test_an_address_of_another_machine(config):
    config.sglang.host = "192.0.2.1"  # of a range that no machine has (RFC 5737)
    assert "sglang.host=192.0.2.1" in the_one(config, ResourceError)


def test_wandb_online_needs_a_key(config, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    config.stats_logger.wandb.mode = "online"
    assert "no key for wandb.example.org" in the_one(config, ResourceError)
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password key\n")
    assert missing(config) == []
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert missing(config) == []


def test_a_cluster_elsewhere_is_not_judged_by_this_machine(config):
    elsewhere = copy.deepcopy(config)
    elsewhere.sglang.device = elsewhere.actor.device = "cuda"
    elsewhere.cluster.address = "10.0.0.1:6379"
    assert missing(elsewhere) == []


def test_everything_is_said_in_one_message(config, tmp_path):
    config.sglang.device = config.actor.device = "cuda"
    config.train_dataset.path = str(tmp_path / "train.jsonl")
    config.reward.fn = "nowhere:score"
    with pytest.raises(UsageError) as error:
        preflight(config, MACHINE, make_plan(config, MACHINE, find_shape(config)))
    assert error.value.exit_code == 2
    assert error.value.message.startswith("3 things are missing before this run can start:\n1. a GPU")
    assert "\n2. the data set" in error.value.message
    assert "\n3. reward.fn" in error.value.message
