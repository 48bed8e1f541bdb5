"""The probes against a real filesystem that is full, and against one that never answers."""

import asyncio
import contextlib
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from actors.monitoring import disk_watch
from actors.monitoring.disk_watch import DiskWatch, probe
from launcher.base.disk_faults import DiskFault, Refusal
from launcher.config.supervision import DiskConfig
from launcher.policy.disk_health import find_trouble
from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)


def settings(**more):
    return DiskConfig(**{"probe_interval_s": 0.02, "settle_s": 0.1, "settle_max_s": 0.4, **more})


@contextlib.contextmanager
def watching(*folders, **more):
    watch = DiskWatch(folders, settings(**more), changed=lambda: None)
    try:
        yield watch
    finally:
        watch.close()


def until(holds):
    give_up_at = time.monotonic() + deadline_s()
    while not (found := holds()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return found


@pytest.fixture
def stalled_at(tmp_path, monkeypatch):
    """A watch whose only probe has begun, and does not return until the end of the block; and the time of that look."""

    @contextlib.contextmanager
    def stalled(stall_s):
        released, fsync = threading.Event(), disk_watch.os.fsync
        monkeypatch.setattr(disk_watch.os, "fsync", lambda fd: released.wait(deadline_s()) and fsync(fd))
        with watching(tmp_path, stall_s=stall_s) as watch:
            until(lambda: watch._probes[str(tmp_path)].look_at_disk().began_at)
            yield watch, time.monotonic()
            released.set()

    return stalled


def fill(folder) -> Path:
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    return ballast


def test_a_probe_leaves_nothing_and_finds_room(tmp_path):
    found = probe(tmp_path, 5.0)
    assert (found.fault, found.last_began_at, list(tmp_path.iterdir())) == (None, 5.0, [])
    assert found.room is not None
    assert found.room.free > 0


def test_a_folder_that_is_not_there_is_unknown_and_no_trouble(tmp_path):
    found = probe(tmp_path / "gone", 5.0)
    assert (found.fault, found.room) == (None, None)


def test_a_full_disk_is_trouble_from_the_probe_on_until_it_has_settled(tiny_disk, monkeypatch):
    monkeypatch.setattr("launcher.base.disk_faults.LEAST_FREE", 4096)  # the filesystem is smaller than what is wanted
    with watching(tiny_disk.path) as watch:
        until(lambda: watch._probes[str(tiny_disk.path)].look_at_disk().last_began_at)
        assert watch.trouble(time.monotonic()) is None
        ballast = fill(tiny_disk)
        trouble = until(lambda: watch.trouble(time.monotonic()))
        assert (trouble.fault, trouble.path, trouble.free) == (DiskFault.FULL, str(tiny_disk.path), 0)
        ballast.unlink()
        until(lambda: watch.trouble(time.monotonic()) is None)


def test_a_disk_that_does_not_answer_blocks_nobody_and_is_named(tmp_path, monkeypatch):
    released, fsync = threading.Event(), disk_watch.os.fsync
    monkeypatch.setattr(disk_watch.os, "fsync", lambda fd: released.wait(deadline_s()) and fsync(fd))
    with watching(tmp_path, stall_s=0.05) as watch:
        trouble = until(lambda: watch.trouble(time.monotonic()))
        assert trouble.fault is DiskFault.STALLED
        asyncio.run(watch.probed(within_s=0.05))  # returns although nothing answers
        released.set()
        until(lambda: watch.trouble(time.monotonic()) is None)


def test_what_a_writer_met_is_trouble_until_a_later_probe_finds_the_room(tmp_path):
    with watching() as watch:
        watch.refused(Refusal(path=str(tmp_path), fault=DiskFault.FULL, at=time.monotonic(), needed=2**60))
        trouble = until(lambda: (t := watch.trouble(time.monotonic())) and t.free and t)
        assert trouble.missing == 2**60 - trouble.free
        watch.refused(Refusal(path=str(tmp_path), fault=DiskFault.FULL, at=time.monotonic(), needed=1))
        until(lambda: watch.trouble(time.monotonic()) is None)


def test_folders_of_one_device_are_probed_once(tmp_path):
    (tmp_path / "other").mkdir()
    with watching(tmp_path, tmp_path / "other", tmp_path / "gone") as watch:
        assert list(watch._probes) == [str(tmp_path)]


def test_the_end_of_a_checkpoint_or_of_a_pause_of_this_process_makes_no_slow_probe_a_stalled_one(stalled_at):
    with stalled_at(stall_s=30.0) as (watch, now):
        assert [watch.trouble(now + second, patient=True) for second in range(100)] == [None] * 100
        assert watch.trouble(now + 101) is None, "it has been waiting for the checkpoint"
        assert watch.trouble(now + 500) is None, "nobody looked for minutes"
        found = [watch.trouble(now + 500 + second) for second in range(33)]
        assert found[29] is None
        assert found[-1].fault is DiskFault.STALLED
        found = [watch.trouble(now + 533 + second, patient=True) for second in range(100)]
        assert all(found), "a checkpoint that begins on a stalled disk does not end the trouble"


def test_a_disk_that_stalls_while_a_checkpoint_is_written_is_found_too(stalled_at):
    """`fsfreeze` in a checkpoint: the trainer said that it was saving for as long as nothing could be written."""
    with stalled_at(stall_s=3.0) as (watch, now):
        found = [watch.trouble(now + second, patient=True) for second in range(35)]
        assert found[:29] == [None] * 29, "a probe may wait for a checkpoint"
        assert found[-1].fault is DiskFault.STALLED


def test_a_refusal_on_the_clock_of_another_machine_neither_waits_for_it_nor_ends_the_run(tmp_path):
    for theirs in (1e9, -1e9):
        with watching(tmp_path) as watch:
            told = Refusal(path=str(tmp_path), fault=DiskFault.FULL, at=theirs)
            watch.refused(told)
            began = time.monotonic()
            trouble = watch.trouble(began)
            assert trouble is not None
            assert abs(trouble.since - began) < deadline_s()
            until(lambda: watch.trouble(time.monotonic()) is None)
            watch.refused(told)
            assert watch.trouble(time.monotonic()) is None, "told again, it is no new one"


def test_a_disk_that_reports_no_size_is_not_full(tmp_path):
    folder = tmp_path / "unlimited"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=0,nr_inodes=0", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    try:
        found = probe(folder, 5.0)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert find_trouble([found], [], settings=DiskConfig(), now=6.0) is None


class Refused:
    """A disk whose probes find room, and whose quota refuses each checkpoint; on a clock of the test's own."""

    def __init__(self, watch, folder):
        self.watch = watch
        self.folder = folder
        self.now = time.monotonic() + 1e6
        self.stepped_at = None

    def trouble(self, after_s=0.0):
        self.now += after_s
        return self.watch.trouble(self.now, stepped_at=self.stepped_at)

    def refuse(self):
        """The trouble that it is, and for how long it stays after the probe that found room."""
        self.watch.refused(Refusal(path=str(self.folder), fault=DiskFault.QUOTA, at=self.now))
        met = self.trouble()
        (refusal,) = self.watch._refusals.values()
        until(lambda: (self.watch._probes[str(self.folder)].look_at_disk().last_began_at or 0.0) > refusal.at)
        waited_s = 0.0
        while self.trouble(0.5) is not None:
            waited_s += 0.5
        return met, waited_s + 0.5

    def commit_a_step(self):
        self.now += 1.0
        self.stepped_at = self.now


def test_a_refusal_that_comes_back_at_each_try_counts_from_the_first(tmp_path):
    """As a quota: each probe finds room, and each checkpoint is refused."""
    with watching(tmp_path, settle_s=2.0, settle_max_s=7.0) as watch:
        disk = Refused(watch, tmp_path)
        met, waits_s = zip(*(disk.refuse() for _ in range(4)), strict=True)
        assert [trouble.first for trouble in met] == [met[0].since] * 4
        assert met[0].since < met[1].since < met[2].since < met[3].since, "each is an incident of its own"
        assert waits_s == (2.0, 4.0, 7.0, 7.0), "each try waits twice as long, up to disk.settle_max_s"
        disk.commit_a_step()
        trouble, wait_s = disk.refuse()
        assert (trouble.first, wait_s) == (trouble.since, 2.0), "between, the run got on"


def test_trouble_counts_from_the_last_step_also_where_that_was_under_way_when_it_was_met(tmp_path):
    with watching(tmp_path, settle_s=2.0, settle_max_s=9.0) as watch:
        disk = Refused(watch, tmp_path)
        first, _ = disk.refuse()
        watch.refused(Refusal(path=str(tmp_path), fault=DiskFault.QUOTA, at=5.0))
        assert disk.trouble().first == first.since
        disk.commit_a_step()
        assert disk.trouble().first > first.since


def test_a_pause_of_this_process_does_not_end_the_trouble_of_a_stalled_disk(tmp_path, monkeypatch):
    """The probe under way was given its whole time again, which is longer than the wait for the end of a trouble."""
    released, fsync = threading.Event(), disk_watch.os.fsync
    monkeypatch.setattr(disk_watch.os, "fsync", lambda fd: released.wait(deadline_s()) and fsync(fd))
    with watching(tmp_path, stall_s=30.0) as watch:
        until(lambda: watch._probes[str(tmp_path)].look_at_disk().began_at)
        now = time.monotonic()
        found = [watch.trouble(now + second) for second in (*range(33), 600, 601, 602, 603)]
        assert all(found[-5:]), "it has not answered"
        released.set()


def test_a_file_that_may_not_be_written_is_tried_until_it_may(tmp_path):
    """The disk was well, so each trouble was called over, and training resumed and stopped again."""
    file = tmp_path / "metrics.jsonl"
    file.mkdir()
    assert probe(tmp_path, 1.0, str(file)).refuses == str(file)
    refusal = Refusal(path=str(tmp_path), fault=DiskFault.REFUSED, at=0.0, file=str(file))
    look = probe(tmp_path, 1.0, str(file))
    assert find_trouble([look], [refusal], settings=DiskConfig(), now=2.0).path == str(file)
    file.rmdir()
    assert find_trouble([probe(tmp_path, 1.0, str(file))], [refusal], settings=DiskConfig(), now=2.0) is None
    file.touch()
    assert probe(tmp_path, 1.0, str(file)).refuses == ""
