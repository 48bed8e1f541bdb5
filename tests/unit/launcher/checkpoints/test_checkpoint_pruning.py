"""The store's own retention, leftovers of crashes, and writes that fail: no older checkpoint is lost."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from launcher.base.errors import CheckpointError
from launcher.checkpoints.checkpoint_store import CheckpointStore
from tests.support.worlds.checkpoints import flip_one_bit, hidden, name_of, save, steps_of, truncate


def test_retention_keeps_the_last_the_marked_and_nothing_else(store):
    for step in range(8):
        save(store, step, keep=step in (0, 3))
    removed = store.prune(keep_last=2)
    assert steps_of(store) == [0, 3, 6, 7]
    assert sorted(checkpoint.global_step for checkpoint in removed) == [1, 2, 4, 5]
    assert [checkpoint.keep for checkpoint in store.list()] == [True, True, False, False]
    assert hidden(store) == []


def test_retention_does_not_count_a_damaged_one_as_safe(store):
    for step in range(4):
        save(store, step)
    flip_one_bit(store.list()[3].path)
    truncate(store.list()[2].path)
    CheckpointStore(store.root).prune(keep_last=1)
    assert steps_of(store) == [1, 2, 3]
    assert CheckpointStore(store.root).latest_complete().checkpoint.global_step == 1


def test_retention_of_none_is_a_mistake(store):
    save(store, 0)
    with pytest.raises(ValueError, match="keep_last=0"):
        store.prune(keep_last=0)


def test_retention_thins_what_restores_set_aside_but_not_what_is_marked_or_damaged(store):
    for step in range(4):
        save(store, step, keep=step == 0)
    store.set_aside_after(-1)
    flip_one_bit(save(store, 9).path)
    save(store, 9)
    store.prune(keep_last=1)
    left = sorted(path.name for path in (store.root / "set_aside").iterdir())
    assert len(left) == 3
    assert left[0] == "epoch0epochstep0globalstep0.superseded-1"
    assert left[-1] == "epoch0epochstep9globalstep9.damaged-1"


def test_one_that_can_not_be_removed_keeps_neither_the_others_nor_the_new_one_from_their_place(store, monkeypatch):
    """One under `chattr +i`: each later save was called failed, nothing was pruned or copied to recover.url any more,
    and a run that had done all its steps ended with ERRORED."""
    for step in range(5):
        save(store, step)
    rename = Path.rename

    def refused(path, target):
        if path.name == str(name_of(2)):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert sorted(one.global_step for one in store.prune(keep_last=1)) == [0, 1, 3]
    assert steps_of(store) == [2, 4]


def test_leftovers_of_a_crash_go_with_the_next_save_not_with_a_reader(store):
    save(store, 0)
    (store.root / ".staging-epoch0epochstep1globalstep1-dead").mkdir()
    (store.root / ".trash-epoch0epochstep1globalstep1-dead").mkdir()
    CheckpointStore(store.root).latest_complete()
    assert len(hidden(store)) == 2
    staged = CheckpointStore(store.root).stage(name_of(2))
    assert hidden(store) == [staged.name]


def test_a_checkpoint_that_was_moved_to_another_disk_is_forgotten_there_and_keeps_no_other_from_being_saved(
    store, tmp_path
):
    """Each later save failed: "Cannot call rmtree on a symbolic link"."""
    for step in range(3):
        save(store, step)
    first, elsewhere = store.list()[0].path, tmp_path / "another disk"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    assert [one.global_step for one in store.prune(keep_last=2)] == [0]
    save(store, 3)
    assert steps_of(store) == [1, 2, 3]
    assert hidden(store) == []
    assert (elsewhere / "manifest.json").exists(), "who moved it may still want it"


def test_a_folder_that_can_not_be_removed_keeps_no_checkpoint_from_being_saved(store, monkeypatch, caplog):
    """As on NFS, while somebody has one of its files open."""
    for step in range(3):
        save(store, step)
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if ignore_errors or ".trash-" not in path.name:
            return remove(path, ignore_errors)
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    store.prune(keep_last=2)
    save(store, 3)
    assert steps_of(store) == [1, 2, 3]
    assert len(hidden(store)) == 1
    assert "Device or resource busy" in caplog.text
    monkeypatch.undo()
    save(store, 4)
    assert hidden(store) == []


def test_a_failing_writer_leaves_nothing_and_becomes_a_checkpoint_error(store):
    save(store, 0)
    with (
        pytest.raises(CheckpointError, match=r"globalstep1 was not written.*serializer broke") as caught,
        store.staging(name_of(1)) as staged,
    ):
        (staged / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("serializer broke")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert steps_of(store) == [0]
    assert hidden(store) == []


def test_an_interrupt_in_a_save_stays_an_interrupt(store):
    with pytest.raises(KeyboardInterrupt), store.staging(name_of(1)):
        raise KeyboardInterrupt
    assert hidden(store) == []


@pytest.mark.parametrize("room", [0, 1000, 4000, 8000, 12000, 16000])
def test_a_full_disk_costs_the_new_checkpoint_and_no_old_one(tiny_disk, room):
    store = CheckpointStore(tiny_disk / "default")
    save(store, 0)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"\0" * max(0, tiny_disk.free() - room))
    with pytest.raises(CheckpointError, match=r"globalstep1 was not written.*No space left") as caught:
        save(store, 1)
    assert "make room" in caught.value.hint
    assert hidden(store) == []
    assert steps_of(store) == [0]
    ballast.unlink()
    save(store, 1)
    assert store.latest_complete().checkpoint.global_step == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write here")
def test_a_folder_that_may_not_be_written(store, tmp_path):
    save(store, 0)
    for folder in (*tmp_path.parents, tmp_path):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tmp_path.parent.parent):
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"was not written.*Permission denied") as caught:
            save(store, 1)
    finally:
        os.seteuid(0)
    assert "permissions" in caught.value.hint
    assert steps_of(store) == [0]
