"""SIGKILL at any moment of save and retention: always the earlier whole checkpoint, or the whole new one.

A real process saves and prunes without end (tests/programs/killed_saver.py). It is killed before each system call of a
round that a file system notices, and, for what lies between them, after a random time.
"""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checkpoints.checkpoint_store import CheckpointState, CheckpointStore
from tests.programs.killed_saver import CALLS

REPOSITORY = Path(__file__).resolve().parents[4]
KEEP_LAST = 2
ONE_ROUND = -1
traces = pytest.mark.skipif(not CALLS, reason="the numbers of this processor's system calls are not known")


class Saver:
    """A process that saves until it is killed; `newest` is the newest whole step on disk after that."""

    def __init__(self, root):
        self.root = root
        command = [sys.executable, "-m", "tests.programs.killed_saver", str(root)]
        self._server = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._server.stdout.readline() == "ready\n"
        self.newest = newest_step(root)

    def calls_of_a_round(self):
        return self.kill(before_call=ONE_ROUND)

    def kill(self, *, before_call=0, after_s=0.0):
        """The calls that were seen until then."""
        self._server.stdin.write(f"{self.newest + 1} {before_call} {after_s}\n")
        seen = ast.literal_eval(self._server.stdout.readline())
        now = newest_step(self.root)
        assert now > self.newest  # at least what was saved whole before the kill
        self.newest = now
        return seen

    def close(self):
        self._server.communicate()


@pytest.fixture
def saver(tmp_path):
    saver = Saver(tmp_path / "default")
    yield saver
    saver.close()


def newest_step(root):
    """The newest step on disk; every listed checkpoint must be whole, and enough of them must be left."""
    store = CheckpointStore(root)
    listed = store.list()
    for checkpoint in listed:
        assert checkpoint.state is CheckpointState.COMMITTED
        assert store.verify(checkpoint) == ()
        data = (checkpoint.path / "optimizer.bin").read_bytes()
        assert data == f"optimizer.bin {checkpoint.global_step} ".encode() * 9000
    assert len(listed) > KEEP_LAST  # and step 0, which was committed with `keep`
    newest = store.latest_complete()
    assert newest.skipped == ()
    return newest.checkpoint.global_step


@pytest.mark.slow
@traces
def test_killed_before_every_call_to_the_filesystem(saver):
    """How many there are is counted here: none is left out where saving comes to make more of them."""
    calls = saver.calls_of_a_round()
    assert calls.keys() >= {"open", "write", "fsync", "close", "mkdir", "rename", "unlink"}
    total = sum(calls.values())
    for number in range(1, total + 1):
        seen = saver.kill(before_call=number)
        assert sum(seen.values()) == number, "it was killed before that call"
    print(f"killed before each of {total} system calls of a save with its retention: {calls}")


@pytest.mark.slow
def test_killed_at_random_times(saver):
    draw = random.Random(8)
    for _ in range(20):
        saver.kill(after_s=draw.uniform(0.0, 0.05))


@traces
def test_what_a_kill_left_behind_goes_with_the_next_save(saver):
    total = sum(saver.calls_of_a_round().values())
    saver.kill(before_call=total // 4)
    leftovers = [path.name for path in saver.root.iterdir() if path.name.startswith(".")]
    assert leftovers != []
    saver.kill(before_call=total)
    assert not any((saver.root / name).exists() for name in leftovers)
