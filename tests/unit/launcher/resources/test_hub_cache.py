"""Hugging Face's cache that can't be written, read or filled: told before anything starts, where something is missing
in it."""

import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelInfo, constants

from launcher.base.errors import DataError, ModelError
from launcher.resources import hub
from tests.support.preflight_parts import missing, the_one


@pytest.fixture
def reachable(empty_cache, monkeypatch):
    """A hub that has each model, with weights of 3 GB."""

    def model_info(api, name, *, timeout, files_metadata):
        files = [
            {"rfilename": name, "size": 3 * 10**9 if files_metadata else None} for name in ("model.safetensors", "x")
        ]
        return ModelInfo(id=name, siblings=files)

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(HfApi, "dataset_info", lambda api, name, **how: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return empty_cache


def of_the_hub(config):
    config.actor.path = config.sglang.model_path = config.tokenizer_path = "some/model"
    return config


def a_file_in_the_place_of(folder):
    """What may not even be written by root."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def in_the_cache(cache, model):
    repository = cache / "hub/models--some--model"
    snapshot = repository / "snapshots/abc"
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    return snapshot


def test_what_can_be_downloaded_is_not_missing(config, reachable):
    config.train_dataset.path = "openai/gsm8k"
    assert missing(of_the_hub(config)) == []


def test_a_model_that_has_no_place_to_be_downloaded_to(config, reachable):
    a_file_in_the_place_of(reachable / "hub")
    told = the_one(of_the_hub(config), ModelError)
    assert f"not in the Hugging Face cache, and its cache {reachable}/hub can't be used: is a file" in told
    assert "HF_HOME" in told


def test_a_cache_that_may_not_be_written_is_enough_where_the_model_is_in_it(config, model, reachable, monkeypatch):
    snapshot = in_the_cache(reachable, model)
    monkeypatch.setattr(hub, "why_not_writable", lambda folder: "Read-only file system")
    assert missing(of_the_hub(config)) == []
    (snapshot / "model.safetensors").unlink()
    told = the_one(config, ModelError)
    assert "has no model.safetensors, and not had from the hub: its cache" in told
    assert "can't be used: Read-only file system" in told


def test_a_cache_that_may_not_be_read(config, reachable, monkeypatch):
    (reachable / "hub").mkdir(parents=True)

    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("pathlib.Path.iterdir", refused)
    assert hub.why_not_kept("model") == f"its cache {reachable}/hub can't be used: Permission denied"
    assert not hub.is_cached_dataset("openai/gsm8k")


def test_a_model_that_the_disk_has_no_room_for(config, model, reachable, monkeypatch):
    usage = SimpleNamespace(free=2 * 10**9)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: usage)
    assert hub.why_unavailable("some/model", kind="model") == (
        f"its cache {reachable}/hub has 1.9 GiB free of the 2.8 GiB that it takes"
    )
    hub.why_unavailable.cache_clear()
    usage.free = 3 * 10**9
    assert hub.why_unavailable("some/model", kind="model") == ""
    hub.why_unavailable.cache_clear()
    usage.free = 0
    (in_the_cache(reachable, model) / "tokenizer.json").unlink()
    assert hub.why_unavailable("some/model", kind="model") == "", "its weights are here"


def test_a_data_set_is_locked_in_its_cache_even_to_be_read(config, reachable, monkeypatch):
    (reachable / "datasets/openai___gsm8k/main").mkdir(parents=True)
    config.train_dataset.path = "openai/gsm8k"
    assert missing(config) == []
    monkeypatch.setattr(hub, "why_not_writable", lambda folder: "Read-only file system")
    told = the_one(config, DataError)
    assert f"train_dataset.path=openai/gsm8k can't be read: its cache {reachable}/datasets can't be used" in told


def test_a_token_that_is_not_ascii_is_named_and_not_shown(config, reachable, monkeypatch):
    """As copied out of a text with typographic signs: the hub was said to be out of reach, and a codec was named."""
    monkeypatch.setenv("HF_TOKEN", "hf_abc–def")
    told = the_one(of_the_hub(config), ModelError)
    assert "HF_TOKEN is no token: its character 7 is not ASCII" in told
    assert "abc" not in told
    assert "codec" not in told
