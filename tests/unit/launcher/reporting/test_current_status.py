"""A disk that doesn't answer must not keep the driver from showing the run and from being stopped."""

import dataclasses
import json
import os
import threading

import pytest

from launcher.base.messages import Cause, Health
from launcher.reporting import current_status
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts, next_beat, read_now
from launcher.run_files.journal import encode
from launcher.run_files.run_paths import RunPaths
from tests.support.health_parts import health_of, server, verdict
from tests.support.worlds.reporting import NOW


def test_a_write_that_does_not_return_stops_nobody_and_there_is_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(current_status, "EVERY_S", 0.0)
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.now.parent.mkdir(parents=True)
    stalled = paths.now.with_name(f".{paths.now.name}.{os.getpid()}")
    os.mkfifo(stalled)  # to open it for writing waits for a reader
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="local", is_detached=False))
    for _ in range(3):
        file.write_if_due()
    (writer,) = (thread for thread in threading.enumerate() if thread.name == "current status")
    assert read_now(paths) is None

    with stalled.open("rb"):
        writer.join()
    paths.now.unlink()  # the pipe has its name
    file.write_if_due()
    file._writer.join()
    assert read_now(paths).beat == 2


def test_where_no_thread_can_be_started_the_driver_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(current_status, "EVERY_S", 0.0)
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.now.parent.mkdir(parents=True)
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="local", is_detached=False))

    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        file.write_if_due()
    assert read_now(paths) is None
    file.write_if_due()
    file._writer.join()
    assert read_now(paths).beat == 2


def test_only_a_beat_after_the_first_that_was_read_shows_that_somebody_writes(tmp_path, monkeypatch):
    """A file that can't be read for a moment, as over a network, has not been written for that."""
    monkeypatch.setattr(current_status, "LOOK_S", 0.0)
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    left, written = NOW, dataclasses.replace(NOW, beat=NOW.beat + 1)

    def found(*seen):
        answers = iter(seen)
        monkeypatch.setattr(current_status, "read_now", lambda _: next(answers, seen[-1]))
        return next_beat(paths, 0.05)

    assert found(left) is None
    assert found(None, left, None, left) is None
    assert found(None) is None
    assert found(left, None, written) == written


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000, b"[]", b"null", b'{"beat": 1}', b'{"attempt": {}}', b"\xff\xfe", b"\x80\x04N."],
)
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path, content):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.now.parent.mkdir(parents=True)
    paths.now.write_bytes(content)
    assert read_now(paths) is None


def test_verdicts_are_read_as_they_were_written_and_nothing_else_is_taken_for_one(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.now.parent.mkdir(parents=True)
    now = dataclasses.replace(NOW, health=health_of(server(judged=verdict(Health.DEAD, "hangs", Cause.SERVER_HANG))))
    written = encode(dataclasses.asdict(now))
    paths.now.write_bytes(written)
    assert read_now(paths) == now
    paths.now.write_bytes(written.replace(b'"DEAD"', b'"FINE"'))
    assert read_now(paths) is None
    older = json.loads(written)
    del older["health"]
    paths.now.write_text(json.dumps(older | {"since": 5}))
    assert read_now(paths) == NOW


def test_a_reason_with_a_file_name_that_is_no_unicode_hides_nothing(tmp_path):
    """Its run was said to write nothing, and its driver to hang."""
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.now.parent.mkdir(parents=True)
    reason = os.fsdecode(b"no room in /data/caf\xe9")
    now = dataclasses.replace(NOW, health=health_of(server(reason=reason)))
    paths.now.write_bytes(encode(dataclasses.asdict(now)))
    assert read_now(paths) == now
