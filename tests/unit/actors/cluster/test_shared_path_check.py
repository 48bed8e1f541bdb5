"""What each node must find at cluster.fileroot, and what is said where it doesn't."""

import os

import pytest

from actors.cluster.shared_path_check import look_at_path
from launcher.run_files.run_keys import ServerKeys


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.cluster.shared_path_check.SEEN_S", 0.2)
    root, keys = tmp_path / "root", tmp_path / "root" / "keys" / "run"
    folder = root / ".same_place.n"
    folder.mkdir(parents=True)
    (folder / "driver").write_text("n")
    ServerKeys.make(keys)
    return folder, keys


def test_the_same_place_is_written_to_and_its_keys_are_read(place, tmp_path):
    folder, keys = place
    seen = look_at_path(folder, tmp_path / "not there", "n", "node-1", keys)
    assert seen.problem == ""
    assert not seen.shares_memory
    assert (folder / "node-1").read_text() == "n"
    assert look_at_path(folder, tmp_path, "n", "node-1", keys).shares_memory


def test_a_path_that_is_not_there(place, tmp_path):
    folder, keys = place
    seen = look_at_path(tmp_path / "other" / folder.name, tmp_path, "n", "node-1", keys)
    assert seen.problem == f"cluster.fileroot={tmp_path / 'other'} is not there"


def test_another_place_of_the_same_name(place, tmp_path):
    folder, keys = place
    (folder / "driver").unlink()
    assert "is another place there" in look_at_path(folder, tmp_path, "n", "node-1", keys).problem
    (folder / "driver").write_text("of another run")
    assert "is another place there" in look_at_path(folder, tmp_path, "n", "node-1", keys).problem


def test_keys_that_this_user_of_that_node_may_not_read(place, tmp_path):
    folder, keys = place
    (keys / "servers.json").chmod(0o644)
    assert "is open to others" in look_at_path(folder, tmp_path, "n", "node-1", keys).problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_can_not_be_written(place, tmp_path):
    folder, keys = place
    folder.chmod(0o500)
    assert "Permission denied" in look_at_path(folder, tmp_path, "n", "node-1", keys).problem
