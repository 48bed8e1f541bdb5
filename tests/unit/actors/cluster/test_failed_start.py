"""A local Ray that did not start: each cause has its own remedy, and load is named only where nothing else was seen."""

import os

import pytest

from actors.cluster import ray_cluster
from actors.cluster.failed_start import error_in_logs, remedy_of_start

TIMED_OUT = Exception("The current node timed out during startup.")
FINE = "[2026-11-27 12:00:00,000 I 12 12] (raylet) main.cc:1: Setting cluster ID\n"


@pytest.fixture
def ray_logs(tmp_path):
    """Ray's folder; writes a log of its newest session."""
    logs = tmp_path / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to("session_1")

    def write(text: str, name: str = "raylet.out", age_s: float = 0.0):
        file = logs / name
        file.write_text(text)
        os.utime(file, (1000.0 - age_s, 1000.0 - age_s))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "make room where TMPDIR is"),
        ("OSError: AF_UNIX path too long", "TMPDIR=/tmp"),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "a folder of yours"),
        ("RuntimeError: can't start new thread", "ulimit -u"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
        ("ModuleNotFoundError: No module named 'grpc'", "PYTHONPATH"),
        ("AttributeError: module 'random' has no attribute 'choices'", "PYTHONPATH"),
        ("MemoryError", "free some memory"),
        ("[2026-11-27 12:00:00,000 E 12 12] (raylet) agent.cc:1: The agent failed: 7", "Ray's own log says"),
    ],
)
def test_each_cause_has_its_own_remedy(ray_logs, log, remedy):
    told = remedy_of_start(TIMED_OUT, ray_logs(f"{FINE}{log}\n{FINE}"), 900.0, took_long=True)
    assert remedy in told
    assert "overloaded" not in told
    assert log[:60].rpartition(" ")[0] in told, "what was seen is shown"


def test_the_machine_is_called_busy_only_where_the_try_took_long_and_no_log_has_an_error(ray_logs):
    folder = ray_logs(FINE)
    assert "overloaded" in remedy_of_start(TIMED_OUT, folder, 900.0, took_long=True)
    assert "overloaded" not in remedy_of_start(TIMED_OUT, folder, 900.0, took_long=False)
    assert str(folder) in remedy_of_start(TIMED_OUT, folder, 900.0, took_long=False)


def test_what_ray_raised_itself_is_a_cause_without_any_log(tmp_path):
    raised = OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /x")
    assert "TMPDIR=/tmp" in remedy_of_start(raised, tmp_path / "none", 0.0, took_long=True)


def test_a_log_of_an_earlier_start_accuses_nothing(ray_logs):
    assert error_in_logs(ray_logs("MemoryError\n", age_s=200.0), 900.0) == ""


def test_the_line_on_the_screen_names_it_too(ray_logs, monkeypatch):
    monkeypatch.setattr(ray_cluster.time, "time", lambda: 900.0)
    folder, said, tries = ray_logs("RuntimeError: can't start new thread\n"), [], []

    def connect():
        tries.append(1)
        if len(tries) == 1:
            raise TIMED_OUT

    ray_cluster.start_patiently(connect, said.append, logs=folder)
    assert "raylet.out: RuntimeError: can't start new thread), and is started again" in said[0]
    assert "the load" not in said[0]
