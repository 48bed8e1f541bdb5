"""What a detached run's driver writes where it can't begin an attempt."""

import time

import pytest

from launcher.base.errors import StorageError
from launcher.cli import detached
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunLock, RunPaths
from launcher.run_log.run_log import last_end, read_run_log
from tests.support.live_status import beating
from tests.support.machine import scaled


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """Drives a run whose first attempt is recorded as begun; returns its paths."""
    config = RunConfig(experiment_name="one", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    Journal(paths.events, 1, time.time).record("run.started", reason="fresh")
    monkeypatch.setattr(detached.ray, "get_actor", lambda name: name)
    monkeypatch.setattr(detached.ray, "kill", lambda actor: None)
    monkeypatch.setattr(detached, "LOCK_S", 0.0)
    monkeypatch.chdir(tmp_path)  # the driver goes there, and later tests would stay there

    def drive(drive_run):
        kind = detached.DetachedDriver.__ray_metadata__.modified_class
        driver = kind.__new__(kind)
        driver._config = config
        driver._drive_run = drive_run
        driver._command = "python -m launcher"
        driver._folder = str(tmp_path)
        driver._server_entry = None
        driver._is_again = False
        driver._drive()
        return paths

    return drive


def locks(config, **_):
    with RunLock(RunPaths.of(config)):
        return 0


@pytest.fixture
def live(driven):
    """Another driver holds the lock, and writes."""
    paths = driven(lambda config, **_: 0)
    with RunLock(paths):
        file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="local", is_detached=True))
        with beating(file):
            yield paths


def test_a_driver_that_is_refused_for_a_live_run_does_not_end_that_run(live, driven, monkeypatch):
    """Its end, of no attempt of its own, counted for the attempt that went on: every tool said ERRORED."""
    monkeypatch.setattr(detached, "BEAT_S", scaled(30.0), raising=False)
    driven(locks)
    assert last_end(live) is None
    assert read_run_log(live).newest_attempt == 1
    assert "is already running" in (live.logs / "driver.log").read_text()


def test_what_keeps_a_driver_from_beginning_is_the_end_of_a_run_that_nobody_drives(driven, monkeypatch):
    monkeypatch.setattr(detached, "BEAT_S", 0.1, raising=False)

    def refused(config, **_):
        raise StorageError("the disk is full")

    assert last_end(driven(refused))["reason"] == "the disk is full"
    with RunLock(paths := driven(lambda config, **_: 0)):  # whose holder hangs, or is another machine's that is lost
        driven(locks)
    end = last_end(paths)
    assert (end["event"], "is already running" in end["reason"]) == ("run.errored", True)
