"""Where a run's files lie, who may write them, and what is said when nobody can."""

import contextlib
import errno
import fcntl
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.errors import ConfigError, StorageError
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.run_files import run_paths
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import (
    LockFile,
    RunLock,
    RunPaths,
    held_by_another,
    is_lock_free,
    lock_file,
    login_name,
)

HOLD_THE_LOCK = """
import sys
from launcher.run_files.run_paths import RunLock, RunPaths
lock = RunLock(RunPaths(fileroot=sys.argv[1], user="ann", experiment_name="exp", trial_name="t0"))
print("held", flush=True)
sys.stdin.read()
"""


def paths_in(folder, **changes):
    return RunPaths(**({"fileroot": folder, "user": "ann", "experiment_name": "exp", "trial_name": "t0"} | changes))


def test_every_path_of_the_contract(tmp_path):
    paths = paths_in(tmp_path)
    logs = tmp_path / "logs/ann/exp/t0"
    checkpoints = tmp_path / "checkpoints/ann/exp/t0"
    assert paths.default_checkpoints == checkpoints / "default"
    assert paths.restore == checkpoints / "restore.json"
    assert paths.metrics == logs / "metrics.jsonl"
    assert paths.events == logs / "events.jsonl"
    assert paths.ledger == logs / "ledger.jsonl"
    assert paths.trainer_log == logs / "trainer.log"
    assert paths.server_log(3) == logs / "llm_server-3.log"
    assert paths.config == logs / "config.yaml"
    assert paths.report == logs / "report.html"
    assert paths.incident(2) == logs / "incidents/2"
    assert pickle.loads(pickle.dumps(paths)) == paths


def test_asking_for_paths_creates_nothing(tmp_path):
    paths = paths_in(tmp_path / "root")
    asked = [getattr(paths, name) for name, value in vars(RunPaths).items() if hasattr(value, "__get__")]
    assert len([path for path in asked if isinstance(path, Path)]) > 15
    assert list(tmp_path.iterdir()) == []


def test_a_relative_fileroot_means_the_same_in_every_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(experiment_name="exp", cluster=ClusterConfig(fileroot="out"))
    paths = RunPaths.of(config)
    monkeypatch.chdir("/")
    assert paths.metrics == tmp_path / f"out/logs/{login_name()}/exp/trial0/metrics.jsonl"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused_by_its_key(tmp_path, name):
    with pytest.raises(ConfigError, match="trial_name"):
        paths_in(tmp_path, trial_name=name)


def test_prepare_is_repeatable_and_leaves_only_folders(tmp_path):
    paths = paths_in(tmp_path)
    paths.prepare()
    paths.prepare()
    assert paths.logs.is_dir()
    assert paths.default_checkpoints.is_dir()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(StorageError, match=r"cluster\.fileroot") as caught:
        paths_in(tmp_path / "root").prepare()
    assert "Not a directory" in caught.value.message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write here")
def test_a_fileroot_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match=r"cluster\.fileroot") as caught:
            paths_in(Path("/")).prepare()
    finally:
        os.seteuid(0)
    assert "Permission denied" in caught.value.message


def test_a_full_disk(tiny_disk):
    (tiny_disk / "ballast").write_bytes(b"\0" * tiny_disk.free())
    with pytest.raises(StorageError, match=r"cluster\.fileroot") as caught:
        paths_in(tiny_disk.path).prepare()
    assert "No space left" in caught.value.message


@pytest.fixture
def holder(tmp_path):
    paths_in(tmp_path).prepare()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@contextlib.contextmanager
def began_again(paths, tmp_path):
    """This process holds the lock, its folder is removed, and another process begins there; which lock was ours."""
    paths.prepare()
    with RunLock(paths):
        mine = lock_file(paths)
        file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="auto", is_detached=False))
        shutil.rmtree(paths.logs)
        paths.prepare()
        with subprocess.Popen(
            [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout.readline() == "held\n"
            yield mine, file, other.pid


def test_who_began_in_a_removed_folder_is_seen_by_the_run_that_still_lives(tmp_path):
    """Both wrote the same ledger and checkpoints."""
    paths = paths_in(tmp_path)
    with began_again(paths, tmp_path) as (mine, file, pid):
        assert held_by_another(paths, mine).startswith(f"pid {pid} on {socket.gethostname()}")
        paths.now.write_text("of the other run")
        file.write_if_due()
        file._writer.join()
        assert file.another == held_by_another(paths, mine)
        assert paths.now.read_text() == "of the other run"


def test_nobody_else_is_seen_where_nobody_holds_the_lock(tmp_path, monkeypatch):
    paths = paths_in(tmp_path)
    paths.prepare()
    assert held_by_another(paths, lock_file(paths)) == ""
    with RunLock(paths):
        mine = lock_file(paths)
        assert held_by_another(paths, mine) == ""
        monkeypatch.setattr(socket, "gethostname", lambda: "as the network calls it now")
        assert held_by_another(paths, mine) == ""
        for content in ("", "{", "[]", json.dumps({"pid": 1, "host": "a copy of an older one", "since": 0.0})):
            paths.lock.unlink()
            paths.lock.write_text(content)
            assert held_by_another(paths, mine) == ""


def test_a_run_is_not_another_where_its_lock_looks_like_another_file(tmp_path):
    """As after a new mount of a network file system, or where the lock could not be read at first."""
    paths = paths_in(tmp_path)
    paths.prepare()
    with RunLock(paths):
        mine = lock_file(paths)
        other_mount = LockFile((mine.device_and_inode[0] + 1, mine.device_and_inode[1]), mine.signature)
        assert held_by_another(paths, other_mount) == held_by_another(paths, None) == ""
        assert held_by_another(paths, LockFile(other_mount.device_and_inode, b"{}")) != ""


def test_a_second_run_is_told_who_holds_the_first(tmp_path, holder):
    with pytest.raises(StorageError) as caught:
        RunLock(paths_in(tmp_path))
    assert "exp/t0 is already running" in caught.value.message
    assert f"pid {holder.pid} on {os.uname().nodename} since 2" in caught.value.message
    assert "trial_name" in caught.value.hint


def test_a_look_whether_the_lock_is_free_keeps_no_run_from_starting(tmp_path, monkeypatch):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    RunLock(paths).release()
    with paths.lock.open("rb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)  # as is_lock_free does, for a moment
        monkeypatch.setattr(run_paths.time, "sleep", lambda _: fcntl.flock(looks, fcntl.LOCK_UN))
        with RunLock(paths):
            assert not is_lock_free(paths)
    assert is_lock_free(paths)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    """As Lustre mounted without `-o flock`."""

    def refuse(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    paths = paths_in(tmp_path)
    paths.prepare()
    with pytest.raises(StorageError, match="file system has no locks: Function not implemented") as caught:
        RunLock(paths)
    assert "-o flock" in caught.value.hint


def test_another_trial_is_not_held(tmp_path, holder):
    other = paths_in(tmp_path, trial_name="t1")
    other.prepare()
    RunLock(other).release()


def test_a_killed_holder_leaves_no_stale_lock(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    RunLock(paths_in(tmp_path)).release()


def test_a_child_process_does_not_keep_the_lock_after_its_parent(tmp_path):
    paths = paths_in(tmp_path)
    paths.prepare()
    lock = RunLock(paths)
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    lock.release()
    RunLock(paths).release()
    child.communicate(b"\n")


def test_attempts_count_up_and_survive(tmp_path):
    paths = paths_in(tmp_path)
    paths.prepare()
    for expected in (1, 2, 3):
        with RunLock(paths) as lock:
            assert lock.next_attempt() == expected


def test_a_run_that_was_copied_without_hidden_files_counts_on(tmp_path):
    """`cp -r run/* …` leaves the counter behind. As attempt 1 again, the Coordinator took the first one's end for its
    own, and the run halted at once."""
    paths = paths_in(tmp_path)
    paths.prepare()
    for attempt in (1, 2, 3):
        Journal(paths.events, attempt).record("run.started")
    Journal(paths.events, 0).record("run.errored")
    with paths.events.open("ab") as file:
        for strange in (2**60, True, '"9"', "[5]"):
            file.write(f'{{"event": "run.started", "attempt": {strange}}}\n'.encode())
        file.write(b'{"attempt": 9}\n{"event": "torn", "attem')
    with RunLock(paths) as lock:
        assert (lock.next_attempt(), lock.next_attempt()) == (4, 5)


def test_an_unreadable_attempt_counter_says_what_to_write(tmp_path):
    paths = paths_in(tmp_path)
    paths.prepare()
    paths.attempt_counter.write_text("many")
    with RunLock(paths) as lock, pytest.raises(StorageError, match=r"\.attempt can't be read") as caught:
        lock.next_attempt()
    assert "events.jsonl" in caught.value.hint


# ── nobody else leads a run elsewhere ──


@pytest.mark.parametrize(
    "link", ["logs", "logs/ann", "logs/ann/exp", "logs/ann/exp/t0", "checkpoints/ann/exp/t0/default", "keys/ann"]
)
def test_a_link_on_the_way_is_refused(tmp_path, link):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "root" / link
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(StorageError, match=f"{link} is a link to {elsewhere}") as caught:
        paths_in(tmp_path / "root").prepare()
    assert "cluster.fileroot" in caught.value.hint
    assert list(elsewhere.iterdir()) == []


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "big_disk")
    paths_in(tmp_path / "root").prepare()
    assert (tmp_path / "big_disk/logs/ann/exp/t0").is_dir()


def test_nobody_else_can_take_the_lock(tmp_path):
    """Who may open it for reading may lock it, and the run would never start."""
    paths = paths_in(tmp_path)
    paths.prepare()
    paths.lock.touch(0o644)
    RunLock(paths).release()
    assert paths.lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "place", ["/", "/logs/ann/exp", "/a/log/ann/exp/t0", "logs/ann/exp/t0", "/a/logs/ann/exp/t0/incidents"]
)
def test_a_folder_that_is_no_runs_logs_names_no_run(place):
    assert RunPaths.of_logs(Path(place)) is None


@pytest.mark.parametrize("root", ["/", "/a", "a/b"])
def test_the_folder_of_a_runs_logs_names_it(root):
    paths = RunPaths(fileroot=Path(root), user="ann", experiment_name="exp", trial_name="t0")
    assert RunPaths.of_logs(paths.logs) == paths
