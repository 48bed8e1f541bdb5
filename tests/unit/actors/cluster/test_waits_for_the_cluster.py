"""What waits before a run has a Coordinator asks whether it is to go on."""

import pytest

from actors.cluster import joined_cluster
from actors.cluster.joined_cluster import wait_for_free_names
from launcher.base.errors import StorageError
from launcher.cli import detached
from launcher.run_files import control_requests
from launcher.run_files.control_requests import ControlRequest, RequestEntry
from launcher.run_files.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path, user="ann", experiment_name="one", trial_name="run")
    made.prepare()
    made.keys.mkdir(parents=True, mode=0o700)
    return made


def test_names_of_a_predecessor_are_not_waited_for_after_a_stop(paths, monkeypatch):
    looks = []
    monkeypatch.setattr(joined_cluster, "names_in", lambda namespace: looks.append(namespace) or {"trainer"})
    monkeypatch.setattr(joined_cluster.time, "sleep", lambda seconds: None)
    with pytest.raises(KeyboardInterrupt):
        wait_for_free_names(paths, besides="driver", is_stopped=lambda: len(looks) == 2)
    assert len(looks) == 2


@pytest.mark.parametrize(("wish", "tries"), [(ControlRequest.STOP, 1), (ControlRequest.RUN, 3), (None, 3)])
def test_a_detached_driver_that_waits_for_the_lock_reads_what_is_asked_of_it(paths, monkeypatch, wish, tries):
    if wish is not None:
        control_requests.ask(paths, RequestEntry(wish=wish, by="ann"))
    monkeypatch.setattr(detached.time, "sleep", lambda seconds: None)
    done = []

    def drive_it():
        done.append(None)
        if len(done) < 3:
            raise StorageError("the lock is held")
        return 0

    def with_patience():
        detached._with_patience(drive_it, is_stopped=lambda: control_requests.asks_to_stop(paths))

    if wish is ControlRequest.STOP:
        with pytest.raises(KeyboardInterrupt, match="ended by a request"):
            with_patience()
    else:
        with_patience()
    assert len(done) == tries
