"""Whom a new incarnation ends before it starts: its own predecessors, and nobody of another run at its path, as in a
container beside."""

import os
import subprocess
from pathlib import Path

import pytest

from actors.foreign.foreign_process import mark_of
from actors.processes.hosted_process import end_earlier
from actors.serving.server_incarnation import server_mark
from launcher.run_files.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="one", trial_name="trial0")
    paths.prepare()
    return paths


@pytest.mark.parametrize("mark", [lambda paths: server_mark(paths.server_log(0)), mark_of], ids=["server", "command"])
def test_another_run_at_the_same_path_is_left_alone(paths, mark):
    left = []
    try:
        for run in ("theirs", "mine"):
            paths.run_id.write_text(f"{run}\n")
            name, _, value = mark(paths).partition("=")
            left.append(subprocess.Popen(["sleep", "600"], env={**os.environ, name: value}))
        end_earlier(mark(paths))
        theirs, mine = left
        assert mine.wait() < 0
        assert theirs.poll() is None
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_a_run_of_before_is_known_by_its_path_alone(paths, monkeypatch):
    log = paths.server_log(0)
    assert server_mark(log) == f"GRPO_SERVER_LOG={log}"

    def unreadable(*_):
        raise OSError(5, "Input/output error")

    paths.run_id.write_text("one")
    monkeypatch.setattr(Path, "read_text", unreadable)
    assert server_mark(log) == f"GRPO_SERVER_LOG={log}", "a start does not fail for it"
