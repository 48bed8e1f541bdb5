"""A store, a store with a copy elsewhere, and a folder in place of /dev/shm, each of a test's own."""

import pytest

from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.checkpoint_store import CheckpointStore
from tests.support.remote_machine import Machine


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "default", clock=lambda: 1700000000.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "far"


@pytest.fixture
def url(folder):
    return f"file://{folder}"


@pytest.fixture
def machine(tmp_path, url):
    return Machine(tmp_path / "here", url)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", folder)
    return folder
