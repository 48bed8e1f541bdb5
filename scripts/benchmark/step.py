"""How the time of a step is spent, from metrics.jsonl: generation, training, and what is neither.

A step lasts from one line to the next, so that all is in it: the gate, the records, the checkpoint. Steps in which the
held-out set was evaluated are left out, and so is the first of each attempt, whose beginning has no line.

With `--prompts` no run is read: a model of random weights takes a step on made batches of lengths as GSM8K's, padded
and packed in turn; and of the complete batch of the settings it is counted how many tokens each way computes.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from torch.distributed._tools.mem_tracker import MemTracker

from actors.model.micro_batches import lay_out, tokens_in_rows
from actors.model.policy_model import PolicyModel
from launcher.base.errors import UsageError
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutGroup
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Record, number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.measured import Measured, Points, paired_ratio
from scripts.benchmark.state import make_model
from scripts.faults.started_run import PRESET, short_lived, until_finished

PARTS = ("rollout", "train", "publish", "checkpoint", "state", "rest", "neither")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=Path, help="the logs folder of an existing run; without it a new run is started")
    parser.add_argument("--steps", type=int, default=60, help="steps of the new run")
    parser.add_argument("--prompts", type=int, help="of a made batch, on which padded and packed steps are compared")
    parser.add_argument("--times", type=int, default=5, help="steps by each way, with --prompts")


def run(arguments: argparse.Namespace) -> Measured:
    if arguments.prompts is not None:
        return padded_and_packed(arguments.prompts, arguments.times, arguments.overrides)
    if arguments.logs is not None:
        found = RunPaths.of_logs(arguments.logs.absolute())
        if found is None:
            raise UsageError(f"--logs {arguments.logs} is not …/logs/<user>/<experiment>/<trial>", "name a run's logs")
        return measured(read_step_times(found))
    with short_lived([f"total_train_steps={arguments.steps}", *arguments.overrides]) as (paths, process):
        until_finished(process, paths)
        return measured(read_step_times(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds. `rest` is what has no name: gate, records, journal, handing over between threads."""

    global_step: int
    wall: float
    rollout: float
    train: float
    publish: float
    checkpoint: float
    state: float = 0.0

    @property
    def neither(self) -> float:
        return self.wall - self.rollout - self.train

    @property
    def rest(self) -> float:
        return self.neither - self.publish - self.checkpoint - self.state


def step_times(lines: Iterable[Record], evaluated_at: Sequence[float]) -> list[StepTime]:
    """`lines` of metrics.jsonl in the order written; `evaluated_at` are the unix times at which an evaluation ended."""
    times = []
    for before, line in pairwise(lines):
        began, ended = number_of(before["time"]), number_of(line["time"])
        if not _follows(before, line) or any(began < at <= ended for at in evaluated_at):
            continue
        parts = {part: number_of(line[f"timeperf/{part}_s"]) for part in ("rollout", "train", "publish", "checkpoint")}
        parts["state"] = number_of(line.get("timeperf/state_s"), 0.0)  # older runs have none
        times.append(StepTime(global_step=int(number_of(line["global_step"])), wall=ended - began, **parts))
    return times


def _follows(before: Record, line: Record) -> bool:
    """In one incarnation of the trainer: else what happened between the two belongs to no step."""
    next_step = number_of(before["global_step"]) + 1
    return before["attempt"] == line["attempt"] and line["global_step"] == next_step


def read_step_times(paths: RunPaths) -> list[StepTime]:
    evaluated = [number_of(event["time"]) for event in read_lines(paths.events) if event["event"] == "eval.done"]
    return step_times(read_lines(paths.metrics), evaluated)


def measured(times: Sequence[StepTime]) -> Measured:
    """Seconds of each part of each step, and its share of the wall time of all steps together."""
    if not times:
        raise UsageError("two lines of one attempt in metrics.jsonl make one step; there are none", "see its logs")
    points = {f"{part}_s": [getattr(time, part) for time in times] for part in ("wall", *PARTS)}
    shares = {f"{part}_%": [100 * sum(points[f"{part}_s"]) / sum(points["wall_s"])] for part in PARTS}
    each = [100 * time.neither / time.wall for time in times]
    return Measured(points=points | shares | {"neither_of_a_step_%": each}, raw=[asdict(time) for time in times])


def padded_and_packed(prompts: int, times: int, overrides: Sequence[str]) -> Measured:
    """Seconds and peak memory of a step over `prompts` groups, after one by each way that warms up."""
    config, source = compose(list(overrides) or [PRESET]), random.Random(0)
    notes = [tokens_computed(config, [gsm8k_lengths(source, config) for _ in range(config.train_dataset.batch_size)])]
    points = Points()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        wide = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
        model = make_model(Path(folder) / "model", **wide, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        actor = replace(config.actor, path=str(model), device="cpu", dtype="float32", dp_size=1, use_lora=False)
        tokenizer = compose([PRESET]).actor.path
        ways = {
            way: PolicyModel(
                replace(actor, use_remove_padding=way == "packed"),
                config.ref,
                temperature=1.0,
                total_steps=1,
                tokenizer_path=tokenizer,
            )
            for way in ("padded", "packed")
        }
        for number in range(times + 1):
            groups = made_groups(source, [gsm8k_lengths(source, config) for _ in range(prompts)])
            for way, policy in ways.items():
                began = time.monotonic()
                stats = policy.compute_gradients(groups)
                seconds = time.monotonic() - began
                if number:
                    points.setdefault(f"{way}_s", []).append(seconds)
                else:
                    largest = policy.largest_micro_batch
                    notes.append(f"{way}: {stats.n_micro_batches} micro-batches, the largest of {largest:,} tokens")
                policy.discard()
        for way, policy in ways.items():
            points[f"{way}_peak_mib"] = [peak_bytes(policy, groups) / 2**20]
    return Measured(
        points=points, ratios={"packed over padded": paired_ratio(points["packed_s"], points["padded_s"])}, notes=notes
    )


def gsm8k_lengths(source: random.Random, config: RunConfig) -> list[tuple[int, int]]:
    """Tokens of a prompt and of each of its completions: lognormal, as GSM8K's characters are (0.38 and 0.49 of log),
    scaled to medians of 90 and 170 tokens. How a model's own answers are spread is not in the data."""
    prompt = round(source.lognormvariate(math.log(90), 0.38))
    most = config.gconfig.max_new_tokens
    return [
        (prompt, min(most, max(1, round(source.lognormvariate(math.log(170), 0.49)))))
        for _ in range(config.gconfig.n_samples)
    ]


def tokens_computed(config: RunConfig, groups: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Half of the groups teach nothing, as where all their rewards are equal."""
    actor = config.actor
    lengths = [prompt + n for group in groups for prompt, n in group]
    learning = [number % 2 == 0 for number, group in enumerate(groups) for _ in group]
    tokens, ranks, most = sum(lengths), actor.dp_size, actor.mb_spec.max_tokens_per_mb
    rows, packed = (lay_out(lengths, learning, most, ranks=ranks, packs=packs) for packs in (False, True))
    said = [
        f"padded {1 - tokens / tokens_in_rows(rows, lengths):.1%} padding in {len(rows[0])} micro-batches of a rank",
        f"packed none in {len(packed[0])}",
    ]
    return f"{config.experiment_name}: {tokens:,} tokens of a batch on {ranks} rank(s): {', '.join(said)}"


def made_groups(source: random.Random, groups: Sequence[Sequence[tuple[int, int]]]) -> list[RolloutGroup]:
    def rollout(n: int, place: int) -> Rollout:
        tokens = tuple(source.randrange(1, 16) for _ in range(n))
        completion = Completion(
            token_ids=tokens, logprobs=(-2.0,) * n, weight_version=0, finish_reason="stop", server="made"
        )
        return Rollout(completion=completion, text="", reward=float(place % 2))

    return [
        RolloutGroup(
            prompt=Prompt(id=str(number), token_ids=(1,) * group[0][0], record={}),
            rollouts=tuple(rollout(n, place) for place, (_, n) in enumerate(group)),
        )
        for number, group in enumerate(groups)
    ]


def peak_bytes(policy: PolicyModel, groups: Sequence[RolloutGroup]) -> int:
    """The most that the tensors which a step makes take at once, as torch counts them."""
    with MemTracker() as tracker:
        policy.compute_gradients(groups)
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
