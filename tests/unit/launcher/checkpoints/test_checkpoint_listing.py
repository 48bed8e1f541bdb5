"""A folder of checkpoints looked at again and again: nothing is read twice, and no change is missed."""

import json
import shutil
import time

import pytest

from launcher.base.errors import CheckpointError
from launcher.checkpoints import checkpoint_folder
from launcher.checkpoints.checkpoint_folder import SETTLED_S, Listing
from launcher.checkpoints.checkpoint_store import CheckpointState
from launcher.checkpoints.manifest import KEEP_MARK, MANIFEST_NAME
from tests.support.worlds.checkpoints import save


class Looks:
    """Later looks at one folder, each long after the last change; counts what they read."""

    def __init__(self, root, monkeypatch):
        self._root, self._listing, self.read = root, Listing(), 0
        once = checkpoint_folder.read_checkpoint

        def counted(path, name):
            self.read += 1
            return once(path, name)

        monkeypatch.setattr(checkpoint_folder, "read_checkpoint", counted)

    def look(self, *, long_after=True):
        self.read = 0
        return self._listing.read(self._root, time.time() + (2 * SETTLED_S if long_after else 0.0))


def test_what_stands_is_read_once(store, monkeypatch):
    for step in range(5):
        save(store, step)
    looks = Looks(store.root, monkeypatch)
    first = looks.look()
    assert looks.read == 5
    assert looks.look() == first
    assert looks.read == 0
    save(store, 5)
    assert [one.global_step for one in looks.look()] == [0, 1, 2, 3, 4, 5]
    assert looks.read == 1


def test_what_was_changed_a_moment_ago_is_read_again(store, monkeypatch):
    """Two changes within one tick of the file system's clock leave the same times."""
    save(store, 1)
    looks = Looks(store.root, monkeypatch)
    looks.look(long_after=False)
    looks.look(long_after=False)
    assert looks.read == 1


def test_every_change_is_seen(store, monkeypatch):
    first, second, third = (save(store, step) for step in (1, 2, 3))
    looks = Looks(store.root, monkeypatch)
    looks.look()
    (first.path / KEEP_MARK).touch()
    manifest = json.loads((second.path / MANIFEST_NAME).read_bytes())
    (second.path / MANIFEST_NAME).write_text(json.dumps(manifest)[:-1])
    shutil.rmtree(third.path)
    save(store, 3, reward=0.9)
    seen = looks.look()
    assert looks.read == 3
    assert seen[0].keep
    assert seen[1].state is CheckpointState.DAMAGED
    assert seen[2].manifest.reward_mean == 0.9
    (first.path / KEEP_MARK).unlink()
    assert not looks.look()[0].keep


def test_a_damaged_one_is_read_each_time(store, monkeypatch):
    damaged = save(store, 1)
    (damaged.path / MANIFEST_NAME).write_text("{")
    looks = Looks(store.root, monkeypatch)
    looks.look()
    looks.look()
    assert looks.read == 1


def test_a_folder_that_can_not_be_read_is_not_an_empty_one(tmp_path):
    root = tmp_path / "default"
    assert Listing().read(root, 0.0) == ()
    root.write_text("no folder")
    with pytest.raises(CheckpointError, match="can't be listed"):
        Listing().read(root, 0.0)


def test_an_error_in_the_middle_is_not_an_empty_folder_either(store, monkeypatch):
    save(store, 1)

    def stale(path, name):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(checkpoint_folder, "read_checkpoint", stale)
    with pytest.raises(CheckpointError, match="Stale file handle"):
        store.list()
