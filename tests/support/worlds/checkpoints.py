"""Checkpoints of one line of text: written, damaged, mirrored, and left by a trainer that was killed."""

import os
import signal
import subprocess
import sys
import time

from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints, StateFacts, write_small
from launcher.config.fingerprint import config_fingerprint
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunPaths

FINGERPRINT = {"experiment_name": "exp", "gconfig.n_samples": 8}
FILES = {"model.safetensors": b"w" * 3000, "config.json": b"{}", "state/optimizer.bin": b"o" * 500}


def name_of(step):
    return CheckpointName(epoch=step // 10, epoch_step=step % 10, global_step=step)


def fill(folder, step=0):
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data + str(step).encode())


def save(store, step, *, keep=False, reward=0.5):
    with store.staging(name_of(step)) as staged:
        fill(staged, step)
        return commit(store, staged, step, keep=keep, reward=reward)


def commit(store, staged, step, *, keep=False, reward=0.5, files=None):
    return store.commit(
        staged,
        global_step=step,
        policy_version=step + 1,
        config_fingerprint=FINGERPRINT,
        health={"reward_mean": reward, "verdict": "HEALTHY"},
        keep=keep,
        files=files,
    )


def steps_of(store):
    return [checkpoint.global_step for checkpoint in store.list()]


def hidden(store):
    return [path.name for path in store.root.iterdir() if path.name.startswith(".")]


def truncate(path):
    os.truncate(path / "model.safetensors", 2999)


def flip_one_bit(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[1234] ^= 1
    file.write_bytes(data)


def lose_manifest(path):
    (path / "manifest.json").unlink()


HEALTHY = [0.5, 0.55, 0.48, 0.52, 0.5] * 8


def began(number, onset, *, cause="reward_collapse", at=1100.0):
    event = {"event": "incident.began", "time": at, "incident": number, "cause": cause, "subject": "policy"}
    return event | {"onset_step": onset, "reason": "it fell"}


class Run:
    """A trial with checkpoints on the disk and states in memory, all of them tiny."""

    def __init__(self, root):
        self.config = RunConfig(experiment_name="states", train_dataset=DatasetConfig(path="none", batch_size=4))
        self.config.gconfig.n_samples = 2
        self.config.actor.path = self.config.ref.path = "model"
        self.config.cluster.fileroot = str(root)
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        Journal(self.paths.events, 1, time.time).record("run.started")
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.states = InMemoryCheckpoints(self.paths)

    def again(self):
        """As the next process sees it."""
        return Run(self.config.cluster.fileroot)

    def save(self, step):
        with self.store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
            (staged / "model.safetensors").write_bytes(b"weights")
            self.store.commit(
                staged,
                global_step=step,
                policy_version=step + 1,
                config_fingerprint=config_fingerprint(self.config),
                health={},
                keep=False,
            )

    def keep(self, step, slots=2, attempt=None):
        newest = self.store.list()[-1] if self.store.list() else None
        folder = self.states.begin(slots)
        files = {"tensors": write_small(folder / "tensors", {"step": step, "filling": "x" * 1000})}
        facts = StateFacts(
            global_step=step,
            run=self.states.run_began(),
            base=None if newest is None else str(newest),
            base_made_at=None if newest is None else newest.manifest.created_at,
            config_fingerprint=config_fingerprint(self.config),
            attempt=attempt,
        )
        self.states.commit(folder, facts, files)
        return folder

    def step(self, step, attempt, *, has_line=True):
        self.keep(step, attempt=attempt)
        if has_line:
            append_line(self.paths.ledger, {"global_step": step, "attempt": attempt})

    def current(self):
        return [state.global_step for state in self.states.current(self.store.list())]

    def newest_complete(self):
        state = self.states.newest_complete(self.store.list())
        return None if state is None else state.global_step

    def facts(self):
        return [(f.global_step, f.in_memory) for f in CheckpointCatalog.of_run(self.config, self.paths).facts(-1)]


KILLED = """
import sys, time
from pathlib import Path
from launcher.checkpoints.remote_store import RemoteStore
from tests.support.remote_machine import Machine
machine = Machine(Path(sys.argv[1]), sys.argv[2])
whole, n = machine.remote._fs.put_file, [0]
def put_file(source, target):
    whole(source, target)
    n[0] += 1
    if n[0] == int(sys.argv[3]):
        print("half", flush=True)
        time.sleep(1000)
machine.remote._fs.put_file = put_file
machine.uploader.turn()
print("whole", flush=True)
time.sleep(1000)
"""


def killed_after(files, root, url, environment=None):
    command = [sys.executable, "-c", KILLED, str(root), url, str(files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment or os.environ) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
