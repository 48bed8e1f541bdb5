"""A start in the background has less of the CPUs, with all that it starts; and as much as others again when told."""

import os
import subprocess
import sys

import pytest

from actors.processes.process_tree import (
    PROC,
    descendants,
    may_raise_priority,
    set_niceness,
    set_session_niceness,
)

HAS_AUTOGROUPS = (PROC / "self" / "autogroup").exists()
needs_autogroups = pytest.mark.skipif(not HAS_AUTOGROUPS, reason="no autogroups here")

PARENT = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("there", flush=True)
time.sleep(600)
"""


def niceness(pid):
    pids = [pid, *(child.pid for child in descendants(pid))]
    tasks = [int(task.name) for pid in pids for task in (PROC / str(pid) / "task").iterdir()]
    return {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}, len(tasks)


@pytest.fixture
def tree():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        pids = [child.pid for child in descendants(process.pid)]
        yield process.pid
        process.kill()
        for pid in pids:
            os.kill(pid, 9)


def test_every_thread_of_a_tree_has_it(tree):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness(tree) == ({own}, 3)
    lower = min(own + 5, 19)
    set_niceness(tree, lower)
    assert niceness(tree) == ({lower if may_raise_priority() else own}, 3)
    set_niceness(tree, own)
    assert niceness(tree) == ({own}, 3)


def test_a_process_that_is_gone_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        set_niceness(process.pid, 10)


def of_session(pid):
    return (PROC / str(pid) / "autogroup").read_text().split()[-1]


@needs_autogroups
def test_a_session_of_its_own_has_it_against_others():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        set_niceness(process.pid, 10)
        assert of_session(process.pid) == "10"
        set_niceness(process.pid, 0)
        assert of_session(process.pid) == "0"
        process.kill()


@needs_autogroups
def test_the_session_of_somebody_else_is_left_alone(tree):
    [member] = descendants(tree)
    set_session_niceness(member.pid, 7)
    assert of_session(member.pid) == of_session(tree) == "0"
