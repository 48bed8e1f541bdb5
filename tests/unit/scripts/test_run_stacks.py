"""`run_control stacks` names what a process hangs in, and says why where it can't."""

import dataclasses
import os
import socket
import subprocess
import sys

import pytest

from launcher.base.errors import UsageError
from launcher.reporting.current_status import CurrentStatus
from scripts import run_stacks

HANGS = """
import sys, time
def waits_for_a_collective():
    print("ready", flush=True)
    time.sleep(600)
waits_for_a_collective()
"""
NOW = CurrentStatus(
    attempt=1, beat=1, host=socket.gethostname(), pid=os.getpid(), address="local", is_detached=False, elapsed_s=1.0
)


@pytest.fixture
def rank():
    """A process with the title of a trainer's rank, which waits in a function that can be recognised."""
    command = ["ray::Trainer.step", "-c", HANGS]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_it_names_the_function_in_which_a_rank_waits_and_leaves_it_running(rank):
    found = list(run_stacks.stacks(NOW))
    at = found.index(next(line for line in found if f"(pid {rank.pid})" in line))
    if found[at + 1].startswith("no stack: "):
        pytest.skip("may not trace other processes here")
    assert "waits_for_a_collective" in found[at + 1]
    assert rank.poll() is None
    assert found[0].endswith(f"(pid {os.getpid()}) ──")


def test_a_process_that_has_ended_is_left_out(rank):
    rank.kill()
    rank.wait()
    assert not any(f"(pid {rank.pid})" in line for line in run_stacks.stacks(NOW))


def test_a_driver_on_another_machine_is_named():
    with pytest.raises(UsageError, match="is on elsewhere"):
        list(run_stacks.stacks(dataclasses.replace(NOW, host="elsewhere")))
