"""SIGKILL at random moments of save and retention: always the earlier whole checkpoint, or the whole new one.

The child saves and prunes without end. It is killed at the n-th thing it asks of the filesystem (seeded, so that a
failure can be run again), and, for what happens in between, after a random time.
"""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checkpoints import CheckpointState, CheckpointStore

REPOSITORY = Path(__file__).resolve().parents[2]
KEEP_LAST = 2
FIRST_STEPS = 3  # saved whole before anything is killed

SAVE_AND_PRUNE = """
import os, signal, sys
from pathlib import Path
root, first, stop_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
from launcher.checkpoints import CheckpointName, CheckpointStore
seen = 0

def count(event, args):
    # Every open, mkdir, rename, unlink and rmdir below the store passes here before it happens.
    global seen
    if event.partition(".")[0] in ("open", "os", "shutil") and any(str(root) in str(arg) for arg in args):
        seen += 1
        if seen == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)

store = CheckpointStore(root)
if stop_at:
    sys.addaudithook(count)
print("started", flush=True)
step = first
while first or step < 3:
    with store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
        for name in ("model.safetensors", "optimizer.bin"):
            (staged / name).write_bytes(f"{name} {step} ".encode() * 9000)
        store.commit(staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={},
                     keep=step % 5 == 0)
    store.prune(2)
    step += 1
"""


def run_child(root, *, first, stop_at=0):
    return subprocess.Popen(
        [sys.executable, "-c", SAVE_AND_PRUNE, str(root), str(first), str(stop_at)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )


def first_steps(root):
    child = run_child(root, first=0)
    child.communicate()
    assert child.returncode == 0
    return newest_step(root)


def newest_step(root):
    """The newest step on disk; every listed checkpoint must be whole, and enough of them must be left."""
    store = CheckpointStore(root)
    listed = store.list()
    for checkpoint in listed:
        assert checkpoint.state is CheckpointState.COMMITTED
        assert store.verify(checkpoint) == ()
        data = (checkpoint.path / "optimizer.bin").read_bytes()
        assert data == f"optimizer.bin {checkpoint.global_step} ".encode() * 9000
    assert sum(not checkpoint.keep for checkpoint in listed) >= 1
    assert len(listed) >= KEEP_LAST
    newest = store.latest_whole()
    assert newest.skipped == ()
    return newest.checkpoint.global_step


def test_killed_at_any_request_to_the_filesystem(tmp_path):
    root = tmp_path / "default"
    newest = first_steps(root)
    draw = random.Random(7)
    for _ in range(28):
        child = run_child(root, first=newest + 1, stop_at=draw.randint(1, 60))
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        now = newest_step(root)
        assert now >= newest
        newest = now
    assert newest > FIRST_STEPS


def test_killed_at_any_time(tmp_path):
    root = tmp_path / "default"
    newest = first_steps(root)
    draw = random.Random(8)
    for _ in range(14):
        child = run_child(root, first=newest + 1)
        assert child.stdout.readline() == b"started\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=draw.uniform(0.0, 0.08))  # not a synchronisation: the moment is what is drawn
        child.kill()
        child.communicate()
        now = newest_step(root)
        assert now >= newest
        newest = now


def test_what_the_kills_left_behind_goes_with_the_next_save(tmp_path):
    root = tmp_path / "default"
    newest = first_steps(root)
    child = run_child(root, first=newest + 1, stop_at=6)
    child.communicate()
    leftovers = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert leftovers != []
    child = run_child(root, first=newest + 1, stop_at=200)
    child.communicate()
    assert not any((root / name).exists() for name in leftovers)
