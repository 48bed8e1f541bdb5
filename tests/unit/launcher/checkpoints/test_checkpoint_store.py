"""CheckpointStore: what is on the disk before the next step, what is hashed, put back and removed, and what is said."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base import durable
from launcher.base.errors import CheckpointError, DiskError
from launcher.checkpoints import checkpoint_store
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from tests.support.worlds.checkpoints import (
    commit,
    fill,
    flip_one_bit,
    hidden,
    lose_manifest,
    name_of,
    save,
    steps_of,
    truncate,
)


@pytest.fixture
def done(monkeypatch, tmp_path):
    """What a file system was asked for, in order: ("sync", path), ("rename", from, to), ("remove", path).

    Of this test alone: a thread of an earlier one, whose disk was slow, may still sync a file of its own.
    """
    calls = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def note(what, path, *more):
        if path.is_relative_to(tmp_path):
            calls.append((what, path, *more))

    def synced(fd):
        note("sync", Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    def renamed(path, target):
        note("rename", path, Path(target))
        return rename(path, target)

    def removed(path, ignore_errors=False):
        note("remove", Path(path))
        rmtree(path, ignore_errors)

    monkeypatch.setattr(durable.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    return calls


@pytest.fixture
def hashed(monkeypatch):
    """The steps of the checkpoints whose bytes were read."""
    steps, verify = [], checkpoint_store.verify_checkpoint

    def verified(path):
        steps.append(CheckpointName.parse(path.name).global_step)
        return verify(path)

    monkeypatch.setattr(checkpoint_store, "verify_checkpoint", verified)
    return steps


def refused(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def after_the_last_rename(calls):
    last = max(at for at, call in enumerate(calls) if call[0] == "rename")
    return calls[last + 1 :]


# ── what a power cut may not undo ──


def test_what_is_set_aside_is_gone_from_the_list_and_there_after_a_power_cut(store, done):
    """Both folders hold a changed name: with only one of them synced the checkpoint is in neither, or restored from."""
    save(store, 1)
    done.clear()
    (moved,) = store.set_aside_after(0)
    assert [call[0] for call in done if call[0] == "rename"] == ["rename"]
    assert after_the_last_rename(done) == [("sync", moved.parent), ("sync", store.root)]


def test_what_is_put_back_is_there_after_a_power_cut(store, done):
    for step in (1, 2):
        save(store, step)
    names = [path.name for path in store.set_aside_after(0)]
    done.clear()
    assert len(store.reinstate(0, names)) == 2
    assert after_the_last_rename(done) == [("sync", store.root)]


def test_where_nothing_is_put_back_nothing_is_written(store, done):
    save(store, 1)
    done.clear()
    assert store.reinstate(0, ["epoch0epochstep9globalstep9.superseded-1"]) == ()
    assert done == []


def test_a_checkpoint_has_left_the_list_for_good_before_its_first_file_is_removed(store, done):
    """Else a power cut brings the name back with half of its files."""
    for step in range(3):
        save(store, step)
    done.clear()
    store.prune(keep_last=1)
    removed = [at for at, call in enumerate(done) if call[0] == "remove" and ".trash-" in call[1].name]
    last_rename = max(at for at, call in enumerate(done) if call[0] == "rename")
    assert len(removed) == 2
    assert ("sync", store.root) in done[last_rename : removed[0]]


def test_the_mark_that_keeps_a_checkpoint_is_on_the_disk_before_its_name_is(store, done):
    """A first checkpoint without its mark is pruned, and nothing is left to go back to."""
    save(store, 0, keep=True)
    named = next(at for at, call in enumerate(done) if call[0] == "rename")
    marks = [call for call in done[:named] if call[0] == "sync" and call[1].name == checkpoint_store.KEEP_MARK]
    assert len(marks) == 1


# ── what is staged ──


def test_a_folder_that_can_not_be_made_is_no_staged_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"globalstep1 was not written.*Not a directory") as caught:
        CheckpointStore(tmp_path / "file" / "default").stage(name_of(1))
    assert isinstance(caught.value, DiskError)
    assert "permissions" in caught.value.hint, "how full a folder's disk is that is not there is not known"


def test_two_are_staged_at_the_same_time_and_neither_is_taken_for_a_leftover(store):
    first, second = store.stage(name_of(1)), store.stage(name_of(2))
    assert first.is_dir()
    for staged, step in ((first, 1), (second, 2)):
        fill(staged, step)
        commit(store, staged, step)
    assert steps_of(store) == [1, 2]


def test_what_resists_when_it_is_abandoned_goes_with_the_next_save(store, monkeypatch):
    staged = store.stage(name_of(1))
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as on NFS, while a file of it is open
        store.abandon(staged)
    assert hidden(store) == [staged.name]
    save(store, 2)
    assert hidden(store) == []


def test_neither_what_another_store_staged_nor_any_other_folder_is_committed(store, tmp_path):
    save(store, 1)
    other = CheckpointStore(tmp_path / "other").stage(name_of(2))
    fill(other, 2)
    with pytest.raises(CheckpointError, match="was not staged here for step 2"):
        commit(store, other, 2)
    notes = store.root / "notes"
    notes.mkdir()
    fill(notes, 2)
    with pytest.raises(CheckpointError, match="notes was not staged here for step 2"):
        commit(store, notes, 2)
    assert steps_of(store) == [1]
    assert (notes / "model.safetensors").exists()
    assert other.exists()


# ── what is hashed: gigabytes, while the run waits ──


def test_what_this_process_committed_is_not_hashed_again_to_prune(store, hashed):
    for step in range(3):
        save(store, step)
    store.prune(keep_last=1)
    assert hashed == []
    assert steps_of(store) == [2]


def test_what_was_verified_is_not_hashed_again_to_prune(store, hashed):
    for step in range(3):
        save(store, step)
    later = CheckpointStore(store.root)
    later.verify(later.find(2))
    later.prune(keep_last=1)
    assert hashed == [2]
    assert steps_of(store) == [2]


def test_of_those_that_stay_the_newest_alone_is_hashed(store, hashed):
    for step in range(4):
        save(store, step)
    CheckpointStore(store.root).prune(keep_last=3)
    assert hashed == [3]
    assert steps_of(store) == [1, 2, 3]


def test_an_older_one_that_is_short_of_bytes_does_not_count_as_kept(store):
    for step in range(4):
        save(store, step)
    truncate(store.find(2).path)
    store.prune(keep_last=2)
    assert steps_of(store) == [1, 2, 3]


def test_what_was_committed_here_and_is_found_damaged_is_not_trusted_any_more(store):
    for step in range(2):
        save(store, step)
    flip_one_bit(store.find(1).path)
    with pytest.raises(CheckpointError, match="was changed"):
        store.verify(store.find(1))
    assert store.prune(keep_last=1) == ()
    assert steps_of(store) == [0, 1]


def test_another_one_in_the_place_of_one_that_was_set_aside_is_not_trusted(store):
    for step in range(2):
        save(store, step)
    store.set_aside_after(0)
    flip_one_bit(save(CheckpointStore(store.root), 1).path)
    assert store.prune(keep_last=1) == ()
    assert steps_of(store) == [0, 1]


# ── what is found, and put back ──


def test_what_is_not_committed_is_not_found(store):
    lose_manifest(save(store, 3).path)
    assert steps_of(store) == [3]
    assert store.find(3) is None


def test_of_two_with_one_step_the_last_of_the_list_is_found(store):
    """A data set of another size: the step has other numbers of epoch and step within it."""
    for epoch, epoch_step in ((0, 3), (1, 0)):
        name = CheckpointName(global_step=3, epoch=epoch, epoch_step=epoch_step)
        with store.staging(name) as staged:
            fill(staged, 3)
            commit(store, staged, 3)
    assert store.find(3).path == store.list()[-1].path != store.list()[0].path


def test_only_later_steps_are_put_back(store):
    for step in (1, 2, 3):
        save(store, step)
    names = [path.name for path in store.set_aside_after(-1)]
    assert [path.name for path in store.reinstate(2, names)] == [str(name_of(3))]
    assert steps_of(store) == [3]


def test_a_folder_that_is_no_checkpoint_s_is_not_put_back(store):
    save(store, 1)
    (moved,) = store.set_aside_after(0)
    notes = moved.parent / "notes.superseded-1"
    notes.mkdir()
    assert [path.name for path in store.reinstate(0, [notes.name, moved.name])] == [str(name_of(1))]
    assert notes.is_dir()


def test_what_can_not_be_put_back_is_said_and_may_be_begun_again(store, monkeypatch):
    save(store, 1)
    (moved,) = store.set_aside_after(0)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", refused(errno.EIO))
        with pytest.raises(DiskError, match=r"set_aside was not written.*Input/output error"):
            store.reinstate(0, [moved.name])
    assert len(store.reinstate(0, [moved.name])) == 1


# ── what is removed ──


def test_what_another_program_saved_is_neither_counted_nor_removed(store):
    """AReaL's own folders have no manifest: a run that took over such a trial pruned what it could not replace."""
    for step in (0, 4):
        lose_manifest(save(store, step).path)
    for step in (1, 2, 3):
        save(store, step)
    assert [one.global_step for one in store.prune(keep_last=2)] == [1]
    assert steps_of(store) == [0, 2, 3, 4]


def test_a_disk_that_does_not_take_the_removal_is_its_fault(store, monkeypatch):
    for step in (0, 1):
        save(store, step)
    monkeypatch.setattr(durable.os, "fsync", refused(errno.EIO))
    with pytest.raises(DiskError, match=r"old checkpoints in .* can't be removed: .*Input/output error"):
        store.prune(keep_last=1)


def test_what_was_removed_is_named_and_what_resists_is_not(store, monkeypatch, caplog):
    leftovers = [store.root / f".{kind}-epoch0epochstep1globalstep1-dead" for kind in ("staging", "trash")]
    for path in leftovers:
        path.mkdir(parents=True)
    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", refused(errno.EBUSY))
        assert store.clean() == ()
    assert caplog.text.count("Device or resource busy") == 2
    assert sorted(store.clean()) == [path.name for path in leftovers]
    assert hidden(store) == []


def test_a_file_with_such_a_name_is_nobody_s_and_is_not_complained_about(store, caplog):
    save(store, 0)
    (store.root / ".trash-notes").write_text("a person's")
    assert store.clean() == ()
    assert caplog.text == ""
    assert hidden(store) == [".trash-notes"]


def test_of_what_restores_set_aside_the_last_written_stays_not_that_of_the_highest_step(tmp_path):
    now = [100.0]
    store = CheckpointStore(tmp_path / "default", clock=lambda: now[0])
    for step in (8, 9, 3):
        save(store, step)
        store.set_aside_after(-1)
        now[0] += 1
    assert {one.global_step for one in store.prune(keep_last=1)} == {8, 9}
    assert [path.name for path in (store.root / "set_aside").iterdir()] == [f"{name_of(3)}.superseded-1"]


def test_one_set_aside_whose_manifest_is_lost_is_left_for_a_person(store):
    for step in (1, 2):
        save(store, step)
    lost, _ = sorted(store.set_aside_after(0))
    lose_manifest(lost)
    assert store.prune(keep_last=1) == ()
    assert lost.exists()


# ── what is said ──


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_inodes_or_over_its_quota_is_full_however_much_room_it_has(store, monkeypatch, number):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**40))
    monkeypatch.setattr(Path, "rename", refused(number))
    with pytest.raises(DiskError) as caught:
        save(store, 1)
    assert "make room" in caught.value.hint


@pytest.mark.parametrize(("free", "hint"), [(2**20 - 1, "make room"), (2**20, "check the folder's permissions")])
def test_an_error_of_torch_on_a_disk_that_has_less_than_a_mebibyte_is_for_want_of_room(store, monkeypatch, free, hint):
    """torch and safetensors report a full disk as errors of their own kinds, without its number."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(CheckpointError) as caught, store.staging(name_of(1)):
        raise RuntimeError("PytorchStreamWriter failed writing file")
    assert hint in caught.value.hint
