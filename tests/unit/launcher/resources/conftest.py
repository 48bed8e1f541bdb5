"""A run that lacks nothing here, and the places from which a test takes something away."""

import copy
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from launcher.config.compose import REPOSITORY
from launcher.resources import hub
from tests.support.preflight_parts import ARITHMETIC


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
