"""A disk that doesn't answer must not keep the driver from showing the run and from being stopped."""

import os
import threading

from launcher.reporting import current_status
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts, read_now
from launcher.run_files.run_paths import RunPaths


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
