"""Lives of a trainer, each of which may be killed: `python -m tests.programs.killed_trainer STEPS` reads orders, one a
line.

The real model, optimizer, checkpoints and states in memory; only the rollouts are replayed. One process loads what
takes seconds and forks a child for each life, which goes back to what stands, as the Coordinator would have it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from actors.data.prompt_queue import PromptQueue
from actors.model import stored_tensors
from actors.model.objective import Objective
from actors.model.policy_model import PolicyModel
from actors.training.admission_gate import AdmissionGate
from actors.training.checkpointing import Checkpointer
from actors.training.step_loop import GrpoLoop
from actors.training.step_records import StepRecords
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.config.schema import ActorConfig, DatasetConfig, GenerationConfig, RecoverConfig, RefConfig, RunConfig
from launcher.policy.restore import FIRST_WEIGHTS, choose
from launcher.run_files.journal import Journal, LineLog, append_line, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.replay import Replay, prompts

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "assets" / "arithmetic" / "model"
N_PROMPTS, BATCH, SAMPLES = 24, 5, 3

MOMENTS = {
    "rollout": (Replay, "collect"),
    "backward": (Objective, "run"),
    "optimizer": (torch.optim.AdamW, "step"),
    "position": (PromptQueue, "commit"),
    "state begun": (InMemoryCheckpoints, "begin"),
    "state half written": (stored_tensors, "_write_at"),
    "state renamed": (InMemoryCheckpoints, "commit"),
    "ledger, metrics": (LineLog, "append"),
    "checkpoint copied": (PolicyModel, "copy_to_host"),
    "checkpoint written": (PolicyModel, "save"),
    "checkpoint renamed": (CheckpointStore, "commit"),
    "checkpoints pruned": (CheckpointStore, "prune"),
}
"""What is called at it; a life ends before or after the n-th call."""


def run_config(root: str, steps: int, *, memory: bool) -> RunConfig:
    config = RunConfig(
        experiment_name="killed",
        seed=3,
        total_train_epochs=steps,
        total_train_steps=steps,
        train_dataset=DatasetConfig(path="none", batch_size=BATCH),
        gconfig=GenerationConfig(n_samples=SAMPLES, max_new_tokens=16),
        actor=ActorConfig(path=str(MODEL), dtype="float32", device="cpu", threads=1),
        recover=RecoverConfig(freq_steps=10, first_steps=None, keep_last=2, memory=memory, memory_share=1.0),
    )
    config.cluster.fileroot = root
    return config


def live(config: RunConfig, model: PolicyModel) -> None:
    """One life, from what stands to the end."""
    paths = RunPaths.of(config)
    journal = Journal(paths.events, 1, time.time)
    queue = PromptQueue([*prompts(N_PROMPTS)], seed=3, shuffle=True)
    first = queue.state_dict()
    checkpointer = Checkpointer(config, paths, journal, model, queue)
    records = StepRecords(paths)

    def published(version: int) -> None:
        append_line(paths.logs / "published.jsonl", {"version": version})

    loop = GrpoLoop(
        config,
        model=model,
        queue=queue,
        rollouts=Replay(prompts(N_PROMPTS), SAMPLES),
        publish=published,
        checkpointer=checkpointer,
        record=lambda report, _: records.write(report),
        gate=AdmissionGate(config, journal, ask=None),
        journal=journal,
        attempt=1,
    )
    step = choose(CheckpointCatalog.of_run(config, paths).facts(-1), None, (), config.restore).global_step
    restored = checkpointer.begin_anew(first) if step == FIRST_WEIGHTS else checkpointer.load_step(step)
    if restored.last is not None:
        records.complete(restored.last)
    loop.restore(restored.position)
    append_line(paths.logs / "lives.jsonl", {"next_step": loop.next_step})
    assert loop.run()
    loop.forget()


def die_at(moment: str, nth: int, when: str) -> None:
    owner, name = MOMENTS[moment]
    original, calls = getattr(owner, name), 0

    def wrapped(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **named)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def fork_life(config: RunConfig, model: PolicyModel, order: dict) -> dict:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            random.seed(3), np.random.seed(3), torch.manual_seed(3)
            if order["moment"]:
                die_at(order["moment"], order["nth"], order["when"])
            live(config, model)
        except BaseException:  # noqa: BLE001 - a fork must never go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if order["after_s"] is not None:
        time.sleep(order["after_s"])
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"exit_code": code, "seconds": time.monotonic() - started}


def main() -> None:
    steps = int(sys.argv[1])
    config = run_config(".", steps, memory=True)
    model = PolicyModel(config.actor, RefConfig(path=str(MODEL), dtype="float32"), temperature=1.0, total_steps=steps)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        config = run_config(order["root"], steps, memory=order["memory"])
        RunPaths.of(config).prepare()
        print(json.dumps(fork_life(config, model, order)), flush=True)


class Trainers:
    """The test's side: one process that forks lives."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.killed_trainer", str(steps)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout.readline() == "ready\n"

    def live(self, root, *, after_s=None, moment="", nth=0, when="", memory=True) -> dict:
        order = {"root": str(root), "after_s": after_s, "moment": moment, "nth": nth, "when": when, "memory": memory}
        self._process.stdin.write(json.dumps(order) + "\n")
        return json.loads(self._process.stdout.readline())

    def paths(self, root) -> RunPaths:
        return RunPaths.of(run_config(str(root), self.steps, memory=True))

    def lines(self, root, name) -> list[dict]:
        return list(read_lines(self.paths(root).logs / name))

    def close(self) -> None:
        self._process.communicate()


if __name__ == "__main__":
    main()
