"""A process that has lost its cluster is replaced by the same command: same pid, and no signal is lost."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from actors.cluster.cluster_restarts import Continuation
from launcher.cli.continuation import Successor
from launcher.cli.unattended import CONTINUES
from tests.support.machine import scaled

KNOWN = Continuation(incident=3, attempt=2, lost_at=1.5, begun=(1.0, 1.5), furthest=9, progress_at=None)
LEFT = dataclasses.replace(KNOWN, screen_began=0.25, lock=3, notified_at=7.5)
PROGRAM = """
import os, subprocess, sys
from actors.cluster.cluster_restarts import Continuation
from launcher.cli.continuation import Successor
from launcher.cli.interrupts import Interrupts
from launcher.run_files.run_paths import RunLock, RunPaths

paths = RunPaths(fileroot={folder!r}, user="ann", experiment_name="again", trial_name="run")
paths.prepare()
successor = Successor()
with Interrupts() as interrupts:
    if successor.known is not None:
        lock = RunLock(paths, held=successor.known.lock)
        interrupts.listen_again()
    print(os.getpid(), sys.argv[1:], successor.known, interrupts.asked, flush=True)
    if successor.known is None:
        lock = RunLock(paths)
        assert lock.descriptor == 3
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
        ended = subprocess.Popen(["true"])
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        interrupts.notified_at = 7.5
        interrupts.hold_back()
        os.kill(os.getpid(), {signal})
        assert not interrupts.asked
        successor.begin({known}, interrupts, screen_began=0.25, lock=lock.descriptor)
descriptors = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")]
print("open", len(descriptors), "children", open(f"/proc/self/task/{{os.getpid()}}/children").read().split())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_same_command_continues_with_what_was_known_the_lock_and_the_signal_that_came_meanwhile(tmp_path, number):
    code = PROGRAM.format(known=repr(KNOWN), signal=int(number), folder=str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-c", code, "key=value", "a b"], capture_output=True, text=True, check=True, timeout=scaled(60)
    )
    first, second, last = process.stdout.splitlines()
    pid = first.split()[0]
    assert first == f"{pid} ['key=value', 'a b'] None False"
    assert second == f"{pid} ['key=value', 'a b'] {LEFT} True"
    assert last == "open 4 children []", "the standard streams, and the lock, which nobody else could take meanwhile"


def test_what_the_process_before_left_is_for_this_one_alone(monkeypatch):
    assert Successor().known is None
    monkeypatch.setenv(
        CONTINUES,
        '{"incident": 3, "attempt": 2, "lost_at": 1.5, "begun": [1.0, 1.5], "furthest": 9, '
        '"progress_at": null, "lock": 3}',
    )
    assert Successor().known == dataclasses.replace(KNOWN, lock=3)
    assert CONTINUES not in os.environ
