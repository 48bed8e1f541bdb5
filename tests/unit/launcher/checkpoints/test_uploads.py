"""Checkpoints at a URL: whole or not there at all, set back with the run, and fetched only where they prove whole."""

import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from launcher.checkpoints import uploads
from tests.support.remote_machine import Machine, deadline_s, far
from tests.support.worlds.checkpoints import killed_after, save

# ── copies ──


def test_every_checkpoint_is_copied_once_and_said(machine):
    save(machine.store, 0)
    save(machine.store, 1, keep=True)
    machine.copy()
    machine.copy()
    assert machine.there() == [0, 1]
    assert [one.keep for one in machine.remote.list()] == [False, True]
    told = machine.events("checkpoint.uploaded")
    assert [event["global_step"] for event in told] == [1, 0], "the newest first"
    assert told[0]["bytes"] > 3000
    assert told[0]["to"] == machine.remote.where


def test_a_fetched_one_is_the_same_and_goes_on_the_same(machine, tmp_path, url):
    saved = save(machine.store, 4, keep=True)
    machine.copy()
    other = Machine(tmp_path / "elsewhere", url)
    fetched = other.fetch()
    assert fetched.global_step == 4
    assert fetched.keep
    assert fetched.manifest.files == saved.manifest.files
    assert fetched.manifest.config_fingerprint == saved.manifest.config_fingerprint
    other.store.verify(fetched)
    other.copy()
    assert other.events("checkpoint.uploaded") == [], "what it has from there it does not copy back"


def test_what_a_restore_set_aside_goes_there_too_and_a_retrained_step_takes_its_place(machine):
    for step in (0, 1, 2):
        save(machine.store, step)
    machine.copy()
    machine.store.set_aside_after(0)
    machine.uploader._set_back_to = 0
    machine.copy()
    assert machine.there() == [0]
    save(machine.store, 1, reward=0.9)
    machine.copy()
    assert [one.manifest.reward_mean for one in machine.remote.list()] == [0.5, 0.9]


@pytest.mark.parametrize("why", ["condemn_after", "set_aside_after"])
def test_what_lies_aside_is_taken_away_by_whoever_comes_next(machine, tmp_path, url, why):
    """The URL was away from the restore to the end of the trainer: an empty disk got what was condemned."""
    for step in (0, 1, 2):
        save(machine.store, step)
    machine.copy()
    getattr(machine.store, why)(0)
    machine.uploader = machine.new_uploader()
    machine.copy()
    assert machine.there() == [0]
    assert Machine(tmp_path / "elsewhere", url).fetch().global_step == 0


def test_what_is_back_and_what_is_made_again_alike_stays_there(machine):
    for step in (0, 1, 2):
        save(machine.store, step)
    machine.copy()
    aside = machine.store.condemn_after(0)
    machine.store.reinstate(0, [path.name for path in aside])
    machine.copy()
    machine.store.set_aside_after(1)
    save(machine.store, 2)
    machine.copy()
    machine.copy()
    assert machine.there() == [0, 1, 2]
    assert len(machine.events("checkpoint.uploaded")) == 3


def test_a_copy_of_one_that_was_set_aside_as_damaged_stays_there(machine):
    """It is the sound one."""
    path = save(machine.store, 0).path
    machine.copy()
    aside = machine.store.root / "set_aside"
    aside.mkdir()
    path.rename(aside / f"{path.name}.damaged-1")
    machine.copy()
    assert machine.there() == [0]


def test_a_step_of_the_same_name_with_other_content_is_copied_anew(machine):
    save(machine.store, 0)
    machine.copy()
    shutil.rmtree(machine.store.list()[0].path)
    with machine.store.staging(machine.remote.list()[0].name) as staged:
        (staged / "model.safetensors").write_bytes(b"other")
        machine.store.commit(
            staged, global_step=0, policy_version=1, config_fingerprint={"a": 1}, health={}, keep=False
        )
    machine.copy()
    assert list(machine.remote.list()[0].manifest.files) == ["model.safetensors"]


def test_retention_there_follows_the_one_here(machine):
    for step in range(6):
        save(machine.store, step, keep=step == 1)
        machine.copy()
        machine.store.prune(3)
    machine.copy()
    assert machine.there() == [1, 3, 4, 5]


def test_a_disk_that_has_few_of_its_own_removes_nothing_there(machine, tmp_path, url):
    for step in range(3):
        save(machine.store, step)
    machine.copy()
    other = Machine(tmp_path / "elsewhere", url, keep_last=2)
    other.fetch()
    other.copy()
    assert other.there() == [0, 1, 2]


def test_one_that_is_pruned_while_it_is_copied_leaves_nothing(machine, monkeypatch):
    one = save(machine.store, 0)
    whole = machine.remote._fs.put_file

    def put_file(source, target):
        whole(source, target)
        shutil.rmtree(one.path, ignore_errors=True)

    monkeypatch.setattr(machine.remote._fs, "put_file", put_file)
    machine.copy()
    assert machine.there() == []
    assert machine.events("checkpoint.upload_failed") == []


def test_a_failure_is_said_once_tried_again_and_made_up_for(machine, monkeypatch):
    save(machine.store, 0)
    whole, tries = machine.remote._fs.put_file, []

    def put_file(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError("denied")
        whole(source, target)

    monkeypatch.setattr(machine.remote._fs, "put_file", put_file)
    monkeypatch.setattr("launcher.checkpoints.uploads.WAIT_FIRST_S", 0.01)
    machine.copy()
    (failed,) = machine.events("checkpoint.upload_failed")
    assert "PermissionError: denied" in failed["reason"]
    assert failed["global_step"] == 0
    assert machine.there() == [0]


def test_what_can_not_be_copied_in_time_is_said_and_ends(machine, monkeypatch):
    save(machine.store, 0)
    monkeypatch.setattr(machine.remote._fs, "put_file", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    assert "no route" in machine.uploader.finish(0.2)


def test_a_peer_that_says_nothing_keeps_the_run_from_its_end_for_no_longer_than_it_may(machine, monkeypatch):
    """It accepts each connection. The driver copied on for ever, after the last step, and said nothing."""
    save(machine.store, 0)
    over = threading.Event()
    monkeypatch.setattr(machine.remote._fs, "put_file", lambda *_: over.wait(deadline_s()))
    assert "0.2 s" in machine.uploader.finish(0.2)
    assert not over.is_set()
    over.set()


def test_a_copy_of_which_nothing_comes_is_said_once_while_the_run_goes_on(machine, monkeypatch):
    save(machine.store, 0)
    over, begun, now = threading.Event(), threading.Event(), [100.0]
    monkeypatch.setattr(uploads, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(machine.remote._fs, "ls", lambda *_, **__: begun.set() or over.wait(deadline_s()))
    machine.uploader.set_back(0)
    assert begun.wait(deadline_s())
    now[0] += uploads.LATE_S
    machine.uploader.committed()
    assert machine.events("checkpoint.upload_failed") == []
    for _ in range(3):
        now[0] += 1.0
        machine.uploader.committed()
    (late,) = machine.events("checkpoint.upload_failed")
    assert "under way for more than" in late["reason"]
    machine.uploader.close()
    over.set()
    machine.uploader._thread.join(deadline_s())


def test_the_thread_copies_beside_the_run_and_not_before_the_run_knows_from_where_it_goes_on(machine):
    save(machine.store, 0)
    machine.uploader.committed()
    assert machine.uploader._thread is None
    assert machine.there() == []
    steps, copied = set(), threading.Event()
    record = machine.uploader._journal.record

    def recorded(event, **facts):
        record(event, **facts)
        if event == "checkpoint.uploaded":
            steps.add(facts["global_step"])
        if steps == {0, 1}:
            copied.set()

    machine.uploader._journal.record = recorded
    machine.uploader.set_back(0)
    save(machine.store, 1)
    machine.uploader.committed()
    assert copied.wait(deadline_s())
    machine.uploader.close()
    machine.uploader._thread.join(deadline_s())
    assert machine.there() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_kill_in_the_middle_leaves_nothing_that_is_listed_and_the_next_copies_it(tmp_path, url, folder, files):
    machine = Machine(tmp_path / "here", url)
    save(machine.store, 0)
    killed_after(files, tmp_path / "here", url)
    assert far(folder, 0).is_dir()
    assert machine.there() == []
    assert Machine(tmp_path / "elsewhere", url).fetch() is None
    machine.copy()
    assert machine.there() == [0]
