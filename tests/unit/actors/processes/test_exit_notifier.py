"""A death is known before the kernel has freed the memory of who died."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from actors.processes.exit_notifier import SLOTS, VARIABLE, ExitNotifier
from actors.processes.process_tree import descendants, dying_with, name, send
from tests.unit.actors.processes.test_process_guard import deadline_s, world

__all__ = ["world"]

HOLD = "from actors.processes.exit_notifier import hold_one; hold_one(); print('held', flush=True)"
HOLDER = f"{HOLD}; import time; time.sleep(1000)"
BUSY = f"{HOLD}\nwhile True: pass"
VITAL_CHILD = """
import ctypes, os, time
from actors.processes.exit_notifier import hold_one
os.register_at_fork(after_in_child=hold_one)
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"vital::one", 0, 0, 0)
else:
    hold_one()
time.sleep(1000)
"""

CHILD_THAT_LINGERS = """
import ctypes, os, signal, threading, time
from actors.processes.exit_notifier import hold_one
if os.fork() == 0:
    hold_one()
    threading.Thread(target=time.sleep, args=(1000,)).start()
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).pthread_exit(0))
    ctypes.CDLL(None).prctl(15, b"vital::one", 0, 0, 0)
time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start(script, path):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, env={**os.environ, VARIABLE: str(path)}
        )
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("script", [HOLDER, BUSY])
def test_a_lock_opens_when_its_holder_is_killed_and_not_before(tmp_path, start, script):
    locks = ExitNotifier.make(tmp_path / "locks")
    victim, other = start(script, tmp_path / "locks"), start(HOLDER, tmp_path / "locks")
    opened, others = locks.opened(victim.pid), locks.opened(other.pid)
    assert select.select([opened, others], [], [], 0.05)[0] == []
    victim.kill()
    assert select.select([opened, others], [], [], deadline_s())[0] == [opened]
    assert dying_with(victim.pid) == -signal.SIGKILL, "known before anybody has collected it"


def test_who_holds_none_has_none(tmp_path, start):
    locks = ExitNotifier.make(tmp_path / "locks")
    assert locks.opened(start(HOLDER, tmp_path / "elsewhere").pid) is None
    assert locks.opened(os.getpid()) is None
    assert dying_with(os.getpid()) is None


def test_more_processes_than_locks_are_no_error(tmp_path, start):
    ExitNotifier.make(tmp_path / "locks")
    script = f"{HOLD}\nfor n in range(40): hold_one()\nprint('all', flush=True)"
    assert start(script, tmp_path / "locks").wait(deadline_s()) == 0
    assert ExitNotifier(tmp_path / "locks").held_by(os.getpid()) is None
    assert SLOTS < 40


async def vital_child(world):
    async with asyncio.timeout(deadline_s()):
        while not (found := [p for p in descendants(world.process.pid) if name(p) == "vital::one"]):
            await asyncio.sleep(0.01)
    await world.is_watched(found[0])
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "child"])
async def test_the_guard_says_who_died_and_of_what(world, victim):
    await world.launch(sys.executable, "-S", "-c", VITAL_CHILD, vital="vital::")
    child = await vital_child(world)
    killed = world.process.pid if victim == "server" else child.pid
    os.kill(killed, signal.SIGKILL)
    ended = await world.process.wait_ended()
    await world.nothing_left([child])
    expected = (-9, "") if victim == "server" else (-9, f"its vital::one (pid {killed}) is gone")
    assert (ended.exit_code, ended.cause) == expected


@pytest.mark.slow
async def test_the_lock_tells_where_a_pidfd_would_not_yet(world):
    """A process whose first thread has ended is still there, and its pidfd silent: what tells of it is the lock."""
    await world.launch(sys.executable, "-S", "-c", CHILD_THAT_LINGERS, vital="vital::")
    child = await vital_child(world)
    send(child, signal.SIGUSR1)
    async with asyncio.timeout(deadline_s()):
        ended = await world.process.wait_ended()
    await world.nothing_left([child])
    pid = child.pid
    assert ended.cause == f"its vital::one (pid {pid}) is gone"
