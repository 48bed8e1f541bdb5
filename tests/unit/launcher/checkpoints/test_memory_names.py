"""The names of a run's folders in the machine's memory, which containers may share: no other run has the same."""

import shutil
import subprocess
import sys

import pytest

from launcher.base.errors import StorageError
from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.in_memory_checkpoints import memory_folder, name_run
from launcher.run_files.run_paths import RunLock, RunPaths
from tests.support.machine import need_programs


@pytest.fixture
def attempt(tmp_path, memory, monkeypatch):
    """An attempt of the run at one path in a container, on its own disk there: the folders that it has in memory."""

    def begin(container):
        disk, place = tmp_path / f"{container}-disk", tmp_path / "place"
        monkeypatch.setattr(in_memory_checkpoints, "mounts", lambda: container)
        disk.mkdir(exist_ok=True)
        disk.rename(place)
        paths = RunPaths(fileroot=place, user="me", experiment_name="one", trial_name="trial0")
        paths.prepare()
        with RunLock(paths) as lock:
            name_run(paths)
            lock.next_attempt()
        folders = [memory_folder(paths, kind) for kind in ("state", "weights")]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        place.rename(disk)
        return folders

    return begin


def test_two_containers_with_a_run_at_the_same_path_do_not_meet(attempt, memory):
    one, other = attempt("one"), attempt("other")
    assert len({*one, *other}) == 4
    assert all(folder.parent == memory and folder.is_dir() for folder in (*one, *other))
    assert (attempt("one"), attempt("other")) == (one, other), "the next attempt finds what its last one left"


def test_what_a_removed_run_left_goes_with_the_next_first_attempt(attempt, tmp_path):
    removed, other = attempt("one"), attempt("other")
    _, weights = removed
    removed.append(weights.with_name(f"{weights.name}.server-0"))
    removed[-1].mkdir()
    shutil.rmtree(tmp_path / "one-disk")
    assert not {*attempt("one")} & {*removed}
    assert not any(folder.exists() for folder in removed)
    assert all(folder.exists() for folder in other)


def test_a_run_of_before_keeps_its_folders(tmp_path, memory):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="one", trial_name="trial0")
    paths.prepare()
    before = memory_folder(paths, "state")
    with RunLock(paths) as lock:
        lock.next_attempt()
    name_run(paths)
    assert memory_folder(paths, "state") == before


def test_a_copy_without_its_hidden_files_gets_a_name_and_removes_nothing(attempt, tmp_path):
    before = attempt("one")
    disk = tmp_path / "one-disk"
    for hidden in disk.rglob(".*"):
        hidden.unlink()
    (disk / "logs/me/one/trial0/events.jsonl").write_text("{}\n")
    assert not {*attempt("one")} & {*before}
    assert all(folder.exists() for folder in before)


def test_the_mounts_of_this_process_are_the_same_twice_and_others_elsewhere():
    need_programs("unshare")
    here = in_memory_checkpoints.mounts()
    assert here == in_memory_checkpoints.mounts()
    told = "from launcher.checkpoints.in_memory_checkpoints import mounts; print(mounts())"
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", told], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr[-200:]}")
    assert done.stdout.strip() not in ("", here)


def test_a_name_that_cannot_be_written_is_said(tmp_path, memory):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="one", trial_name="trial0")
    with pytest.raises(StorageError, match=r"\.run_id can't be written: No such file or directory"):
        name_run(paths)
