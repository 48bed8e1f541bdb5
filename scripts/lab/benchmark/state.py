"""Benchmark `state`: how long a step waits for its state in memory and for a checkpoint, of a model of random weights.

Written on the step's path and beside a next step that takes `--step-s`, in turn. Written on the path, the trainer waits
until all of it is whole; it makes one copy more than it would have to, which `copy` tells.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.training.checkpointing import CHECKPOINT_S, STATE_S, Checkpointer
from actors.training.run_position import RunPosition
from launcher.base.messages import StepReport
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.manifest import PIECE_BYTES, list_files, record_files
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths
from scripts.faults.started_run import PRESET
from scripts.lab.benchmark.measured import Measured, Points, paired_ratio

HIDDEN, LAYER = 1024, 16_779_264
"""The width of the model, and the parameters of one of its layers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--millions", type=int, default=100, help="parameters of the model, about")
    parser.add_argument("--times", type=int, default=5, help="states and checkpoints by each way")
    parser.add_argument("--step-s", type=float, default=30.0, help="of rollouts and gradients, which write nothing")


def run(arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        layers = max(1, arguments.millions * 10**6 // LAYER)
        wide = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": layers}
        model = make_model(Path(folder) / "model", **wide, num_attention_heads=16, num_key_value_heads=16)
        words = [
            PRESET,
            f"actor.path={model}",
            f"tokenizer_path={compose([PRESET]).actor.path}",
            "actor.dtype=bfloat16",
        ]
        words += [f"cluster.fileroot={folder}", "recover.memory_share=1.0", "recover.keep_last=2"]
        found = measure(compose([*words, *arguments.overrides]), arguments.times, arguments.step_s)
    ratios = {
        f"{what}, beside over on the path": paired_ratio(found[f"{what}_beside_s"], found[f"{what}_on_the_path_s"])
        for what in ("state", "checkpoint")
    }
    return Measured(points=found, ratios=ratios)


def make_model(folder: Path, **shape: object) -> Path:
    """Random weights in the shape of the preset's model, but for the keys of its config.json that are given."""
    config = AutoConfig.from_pretrained(compose([PRESET]).actor.path, trust_remote_code=False)
    config.update(shape)
    config.update({"layer_types": ["full_attention"] * config.num_hidden_layers})
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


class StateSteps:
    """A trainer without rollouts: its state after each step is that of the first one."""

    def __init__(self, config: RunConfig) -> None:
        paths = RunPaths.of(config)
        paths.prepare()
        self.model = PolicyModel(
            config.actor, config.ref, temperature=1.0, total_steps=1, tokenizer_path=config.tokenizer_path
        )
        for parameter in self.model._part.parameters.values():  # no batch is needed for AdamW to have moments
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.model._part.step(1e-6)
        self.checkpointer = Checkpointer(config, paths, Journal(paths.events, 1))
        self._queue = PromptQueue(["a"], seed=1, shuffle=False)
        self._position = RunPosition()

    def remember(self) -> None:
        self._step()
        step = self._position.next_step - 1
        self.checkpointer.remember(self.model, self._queue, self._position, report_of(step), lambda: None)

    def save(self) -> None:
        self._step()
        self.checkpointer.save(self.model, self._queue, self._position, lambda: True)

    def _step(self) -> None:
        self._position = self._position.after_step(reward=0.0, epoch=0)
        self.checkpointer.stalls()


def report_of(step: int) -> StepReport:
    return StepReport(
        global_step=step,
        epoch=0,
        epoch_step=step,
        attempt=1,
        policy_version=step + 1,
        time=time.time(),
        prompt_ids=("a",),
        weight_versions=(step,),
        rollouts_failed=0,
        rollouts_retried=0,
        metrics={},
    )


def measure(config: RunConfig, times: int, step_s: float) -> Points:
    """Seconds that a step waited, after one round that warms up: a slot that was never written has no pages yet."""
    steps, seconds = StateSteps(config), Points()
    checkpointer = steps.checkpointer
    try:
        for number in range(times + 1):
            found = {}
            steps.remember()
            checkpointer.wait_to_step()
            found["state_on_the_path_s"] = checkpointer.stalls()[STATE_S]
            steps.remember()
            time.sleep(step_s)
            checkpointer.wait_to_step()
            found["state_beside_s"] = checkpointer.stalls()[STATE_S]
            began = time.monotonic()
            steps.model.detached(steps.model.training_state(), room=float("inf"))
            found["copy_s"] = time.monotonic() - began
            steps.save()
            checkpointer.conclude(required=True)
            found["checkpoint_on_the_path_s"] = checkpointer.stalls()[CHECKPOINT_S]
            steps.save()
            time.sleep(step_s)
            checkpointer.wait_to_step()
            found["checkpoint_beside_s"] = checkpointer.stalls()[CHECKPOINT_S]
            checkpointer.conclude(required=True)
            found |= time_hashing(newest(RunPaths.of(config)))
            if number:
                for name, second in found.items():
                    seconds.setdefault(name, []).append(second)
    finally:
        checkpointer.settle()
        InMemoryCheckpoints(RunPaths.of(config)).remove()
    return seconds


def newest(paths: RunPaths) -> Path:
    return max(paths.default_checkpoints.glob("epoch*"), key=lambda folder: folder.stat().st_mtime)


def time_hashing(folder: Path) -> dict[str, float]:
    """Seconds for a GB of a checkpoint that is on the disk already, each file in one piece and in several."""
    gigabytes = sum(path.stat().st_size for path in list_files(folder)) / 1e9
    found = {}
    for name, piece_bytes in (("whole_hash_s_per_gb", sys.maxsize), ("hash_in_pieces_s_per_gb", PIECE_BYTES)):
        began = time.monotonic()
        record_files(folder, piece_bytes=piece_bytes)
        found[name] = (time.monotonic() - began) / gigabytes
    return found
