"""SIGKILL at any moment of save and retention: always the earlier whole checkpoint, or the whole new one.

A real process saves and prunes without end. It is killed before its n-th request to the filesystem, for every n of
a round, and, for what lies between requests, after a random time.
"""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checkpoints.checkpoint_store import CheckpointState, CheckpointStore

REPOSITORY = Path(__file__).resolve().parents[4]
KEEP_LAST = 2
REQUESTS_OF_A_ROUND = 48

# One interpreter, which forks a child for each kill: starting Python anew each time would take most of the time.
FORKING_SERVER = """
import os, signal, sys, time
from pathlib import Path
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
root = Path(sys.argv[1])

def save_and_prune(store, step):
    with store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
        for name in ("model.safetensors", "optimizer.bin"):
            (staged / name).write_bytes(f"{name} {step} ".encode() * 9000)
        store.commit(staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={},
                     keep=step == 0)
    store.prune(2)

def die_before_request(number):
    seen = 0
    def count(event, args):  # every open, mkdir, rename, unlink and rmdir passes here before it happens
        nonlocal seen
        if event.partition(".")[0] in ("open", "os", "shutil"):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

store = CheckpointStore(root)
for step in range(3):
    save_and_prune(store, step)
print("ready", flush=True)
for line in sys.stdin:
    step, number, seconds = int(line.split()[0]), int(line.split()[1]), float(line.split()[2])
    save_and_prune(store, step)  # each kill meets the same state: nothing left over, one to remove
    child = os.fork()
    if child == 0:
        if number:
            die_before_request(number)
        while True:
            step += 1
            save_and_prune(CheckpointStore(root), step)
    if not number:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Saver:
    """A process that saves until it is killed; `newest` is the newest whole step on disk after that."""

    def __init__(self, root):
        self.root = root
        command = [sys.executable, "-c", FORKING_SERVER, str(root)]
        self._server = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._server.stdout.readline() == "ready\n"
        self.newest = newest_step(root)

    def kill(self, *, before_request=0, after_s=0.0):
        self._server.stdin.write(f"{self.newest + 1} {before_request} {after_s}\n")
        assert int(self._server.stdout.readline()) == -signal.SIGKILL
        now = newest_step(self.root)
        assert now > self.newest  # at least what was saved whole before the kill
        self.newest = now

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


def test_killed_before_every_request_to_the_filesystem(saver):
    for number in range(1, REQUESTS_OF_A_ROUND + 1):
        saver.kill(before_request=number)


def test_killed_at_random_times(saver):
    draw = random.Random(8)
    for _ in range(20):
        saver.kill(after_s=draw.uniform(0.0, 0.05))


def test_what_a_kill_left_behind_goes_with_the_next_save(saver):
    saver.kill(before_request=6)
    leftovers = [path.name for path in saver.root.iterdir() if path.name.startswith(".")]
    assert leftovers != []
    saver.kill(before_request=47)
    assert not any((saver.root / name).exists() for name in leftovers)
