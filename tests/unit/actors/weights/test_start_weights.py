"""A server that starts keeps its files, whatever the trainer publishes and removes meanwhile."""

import errno
import shutil

import pytest

from actors.weights import start_weights
from actors.weights.start_weights import forget, keep_checkpoint, keep_for, release
from launcher.base.messages import PublishedWeights
from launcher.checkpoints.checkpoint_store import CheckpointStore
from tests.support.bare_checkpoints import commit_files

NAMES = ("config.json", "model.safetensors", "position.json", "training_state.json", "training_state.tensors")


def published(tmp_path, version):
    folder = tmp_path / "weights" / f"v{version}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights %d" % version)
    return PublishedWeights(path=str(folder), version=version, lineage=2)


def test_they_outlive_the_folder_they_came_from(tmp_path):
    weights = published(tmp_path, 4)
    kept = keep_for("server-1", weights)
    shutil.rmtree(tmp_path / "weights")
    assert (kept.version, kept.lineage) == (4, 2)
    assert (tmp_path / "weights.server-1" / "model.safetensors").read_bytes() == b"weights 4"
    assert kept.path == str(tmp_path / "weights.server-1")


def test_the_next_start_takes_the_place_of_the_one_before(tmp_path):
    keep_for("server-1", published(tmp_path, 4))
    keep_for("server-1", published(tmp_path, 5))
    assert (tmp_path / "weights.server-1" / "model.safetensors").read_bytes() == b"weights 5"
    forget("server-1", PublishedWeights(path=str(tmp_path / "weights" / "v5"), version=5, lineage=2))
    assert not (tmp_path / "weights.server-1").exists()


def test_a_folder_that_has_gone_is_none_to_start_from(tmp_path):
    gone = PublishedWeights(path=str(tmp_path / "weights" / "v1"), version=1, lineage=0)
    assert keep_for("server-1", gone) is None


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "default")


@pytest.mark.parametrize("moved_by", ["set aside", "pruned"])
def test_a_server_that_starts_from_a_checkpoint_keeps_it_whatever_becomes_of_its_folder(store, moved_by):
    found = commit_files(store, 3, NAMES)
    kept = keep_checkpoint("server-0", found)
    if moved_by == "set aside":
        store.set_aside_after(2)
    else:
        commit_files(store, 4, NAMES)
        store.prune(1)
    assert not found.path.exists()
    assert (kept.version, kept.lineage) == (4, None)
    there = {path.name: path.read_text() for path in (store.root / ".start-server-0").iterdir()}
    assert kept.path == str(store.root / ".start-server-0")
    assert there == {"config.json": "config.json of step 3", "model.safetensors": "model.safetensors of step 3"}
    assert [one.global_step for one in store.list()] == ([] if moved_by == "set aside" else [4])
    release("server-0", store.root)
    assert not (store.root / ".start-server-0").exists()


def test_a_checkpoint_that_has_gone_is_none_to_start_from(store):
    found = commit_files(store, 3, NAMES)
    store.set_aside_after(-1)
    assert keep_checkpoint("server-0", found) is None


def test_where_a_disk_has_no_hard_links_the_server_starts_from_the_checkpoint_itself(store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(start_weights.os, "link", refuse)
    found = commit_files(store, 3, NAMES)
    assert keep_checkpoint("server-0", found).path == str(found.path)
    assert not (store.root / ".start-server-0").exists()
