"""Whom a new incarnation ends before it starts: its own predecessors, and nobody of a run in another container."""

import contextlib
import os
import signal
import subprocess

import pytest

from actors.processes.guarded_process import ProcessLaunch, end_earlier
from actors.processes.process_tree import bearing, identify, sees
from scripts.faults.run_processes import holds_open

MARK = "GRPO_EARLIER_INCARNATION"
ANOTHER = "mount -t tmpfs none {folder}"
THE_SAME = "true"


@pytest.fixture
def left(tmp_path):
    """A process with the run's mark and its log open, in a mount namespace that begins with a command."""
    with contextlib.ExitStack() as stack:

        def start(mounts):
            script = f"{mounts.format(folder=tmp_path)} && exec 9>>{tmp_path}/one.log && echo up && exec sleep 600"
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script],
                env={**os.environ, MARK: str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            if process.stdout.readline() != "up\n":
                pytest.skip(f"no mount namespace: {process.stderr.read()[-200:]}")
            return process

        yield start


def launch_at(folder):
    return ProcessLaunch(
        command=("true",), environment={}, log=folder / "one.log", mark=f"{MARK}={folder}", watch=(), grace_s=0
    )


def test_another_containers_run_at_the_same_path_is_left_alone(left, tmp_path):
    theirs, mine = left(ANOTHER), left(THE_SAME)
    (tmp_path / "one.log").touch()
    assert {one.pid for one in bearing(f"{MARK}={tmp_path}")} == {theirs.pid, mine.pid}
    assert holds_open(identify(mine.pid), tmp_path / "one.log")
    assert not holds_open(identify(theirs.pid), tmp_path / "one.log")
    end_earlier(launch_at(tmp_path))
    assert mine.wait() == -signal.SIGKILL
    assert theirs.poll() is None


def test_who_is_gone_sees_nothing(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not sees(gone.pid, tmp_path)
    assert sees(os.getpid(), tmp_path / "not_there_yet"), "the same mounts show the same"
