"""A disk that does not give its files for a moment: no checkpoint is called damaged, and no older one is used."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from launcher.base.errors import CheckpointError, DiskError
from launcher.checkpoints import checkpoint_folder, checkpoint_store
from launcher.checkpoints.checkpoint_folder import list_folder, refuse_unread
from tests.support.worlds.checkpoints import Run, save


@pytest.fixture
def unread(monkeypatch):
    """Folders whose files can't be opened, though they are there."""
    folders, opened = [], Path.open

    def refused(path, *args, **kwargs):
        if path.exists() and any(path.is_relative_to(folder) for folder in folders):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    return folders


def test_a_disk_that_gives_no_checkpoint_is_not_one_without_any(store, unread):
    """A launch would begin at an older step, or at the first, and set aside what it could not read."""
    save(store, 1), save(store, 2)
    unread.append(store.root)
    for ask in (store.list, store.latest_complete, lambda: refuse_unread(store.root / "epoch0epochstep2globalstep2")):
        with pytest.raises(DiskError, match="can't be read: Input/output error"):
            ask()
    unread.clear()
    assert store.latest_complete().checkpoint.global_step == 2


def test_what_is_lost_while_it_is_hashed_is_not_passed_over(store, unread, monkeypatch):
    checkpoints = [save(store, step) for step in (1, 2)]
    verify = checkpoint_store.verify_checkpoint

    def lost_meanwhile(path):
        unread.append(store.root)
        return verify(path)

    monkeypatch.setattr(checkpoint_store, "verify_checkpoint", lost_meanwhile)
    with pytest.raises(DiskError):
        store.latest_complete()
    unread.clear()
    assert store.list() == tuple(checkpoints)


def test_one_that_alone_can_not_be_read_is_damaged(store, unread):
    """A bad sector stays: the next older one is used."""
    save(store, 1)
    unread.append(save(store, 2).path)
    newest = store.latest_complete()
    assert newest.checkpoint.global_step == 1
    assert "Input/output error" in newest.skipped[0]


def test_one_that_is_torn_or_short_of_a_file_is_no_fault_of_the_disk(store):
    path = save(store, 1).path
    next(path.glob("*.safetensors")).unlink()
    (path / "manifest.json").write_text("{")
    refuse_unread(path)
    assert store.latest_complete().checkpoint is None


def test_what_a_disk_does_not_take_is_its_fault(store, monkeypatch):
    """The checkpoint that is gone back to was called damaged, as later ones could not be set aside."""
    save(store, 1), save(store, 2)

    def refused(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(DiskError, match="Stale file handle"):
        store.set_aside_after(1)


@pytest.mark.usefixtures("memory")
def test_a_state_that_can_not_be_read_now_is_not_damaged(tmp_path, unread):
    run = Run(tmp_path)
    run.keep(3)
    (state,) = run.states.current([])
    unread.append(run.states.root)
    with pytest.raises(DiskError):
        state.verify()
    unread.clear()
    (state.path / next(iter(state.files))).unlink()
    with pytest.raises(CheckpointError) as missing:
        state.verify()
    assert not isinstance(missing.value, DiskError)


def test_a_folder_that_can_not_be_read_is_not_an_empty_one(tmp_path):
    root = tmp_path / "default"
    assert list_folder(root) == ()
    root.write_text("no folder")
    with pytest.raises(CheckpointError, match="can't be listed"):
        list_folder(root)


def test_an_error_in_the_middle_is_not_an_empty_folder_either(store, monkeypatch):
    save(store, 1)

    def stale(path, name):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(checkpoint_folder, "read_checkpoint", stale)
    with pytest.raises(CheckpointError, match="Stale file handle"):
        store.list()


def test_what_is_pruned_while_it_is_read_was_not_damaged(store, monkeypatch):
    save(store, 1), save(store, 2)
    once = checkpoint_folder.read_checkpoint

    def gone_meanwhile(path, name):
        if name.global_step == 1:
            shutil.rmtree(path)
        return once(path, name)

    monkeypatch.setattr(checkpoint_folder, "read_checkpoint", gone_meanwhile)
    assert [one.global_step for one in store.list()] == [2]
