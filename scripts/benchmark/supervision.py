"""Benchmark `supervision`: steps with supervision against steps without it, in pairs of blocks of one run
(switched_run.py).

A step lasts from one line of metrics.jsonl to the next, so that everything is in it. The first step of a block is in
none: within it supervision is switched. The learning rate is next to nothing, so that steps stay equal work.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from launcher.run_files.journal import Record, read_lines
from scripts.benchmark.experiment import run_experiment
from scripts.benchmark.ratios import mean_ratio, spread
from scripts.benchmark.switched_run import DONE, SwitchSchedule, environment

WARM_UP = 20
"""Steps before the first block."""
SAME_WORK = (
    "actor.optimizer.lr=1e-9",
    "evaluator.freq_steps=100000",
    "recover.freq_steps=null",
    "recover.first_steps=null",
    "recover.freq_secs=null",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """Seconds of each step; `cpu_s` of each process and `gate_s` of the trainer, per step."""

    is_on: bool
    step_s: tuple[float, ...]
    gate_s: float
    cpu_s: Mapping[str, float]


Pairs = Sequence[tuple[StepBlock, StepBlock]]
"""Of (on, off)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=34, help="pairs of blocks, one with and one without supervision")
    parser.add_argument("--block", type=int, default=6, help="steps in a block, of which the first is not counted")
    parser.add_argument("--seed", type=int, default=0, help="seed for the order within the pairs")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    schedule = SwitchSchedule(first=WARM_UP, block=arguments.block, pairs=arguments.pairs, seed=arguments.seed)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        made = run_experiment(
            Path(folder),
            [*SAME_WORK, f"total_train_steps={schedule.steps}", *arguments.overrides],
            environment=environment(schedule),
            module="scripts.benchmark.switched_run",
        )
        return report(pair_up(read_lines(made.paths.metrics), read_lines(made.paths.logs / DONE), schedule))


def pair_up(metrics: Iterable[Record], switched: Iterable[Record], schedule: SwitchSchedule) -> Pairs:
    """`metrics` are lines of metrics.jsonl, `switched` those that the switch wrote, one where each block begins and
    one where the last ends. Raises ValueError where a block is not complete."""
    lasted = {
        int(str(line["global_step"])): float(str(line["time"])) - float(str(before["time"]))
        for before, line in pairwise(metrics)
    }
    blocks = []
    for number, (begun, ended) in enumerate(pairwise(switched)):
        first = schedule.first + number * schedule.block
        if begun["step"] != first or ended["step"] != first + schedule.block:
            raise ValueError(f"block {number} goes from step {begun['step']} to {ended['step']}: steps were repeated")
        blocks.append(
            StepBlock(
                is_on=bool(begun["on"]),
                step_s=tuple(lasted[step] for step in range(first + 1, first + schedule.block)),
                gate_s=float(str(ended["gate_s"])) / schedule.block,
                cpu_s=_used(begun, ended, schedule.block),
            )
        )
    pairs = [tuple(sorted(pair, key=lambda b: not b.is_on)) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    return [(on, off) for on, off in pairs]


def _used(begun: Record, ended: Record, steps: int) -> dict[str, float]:
    before, after = begun["cpu_s"], ended["cpu_s"]
    assert isinstance(before, Mapping) and isinstance(after, Mapping)
    return {name: (after[name] - before[name]) / steps for name in after}


def report(pairs: Pairs) -> dict[str, object]:
    on, off = ([pair[side] for pair in pairs] for side in (0, 1))
    step_s = [[fmean(block.step_s) for block in blocks] for blocks in (on, off)]
    middle = [[median(block.step_s) for block in blocks] for blocks in (on, off)]
    all_time = mean_ratio(list(zip(*step_s, strict=True)))
    typical = mean_ratio(list(zip(*middle, strict=True)))
    print(f"{len(pairs)} pairs of {len(on[0].step_s)} steps a block; step on {spread(step_s[0], ' s', 3)}")
    print(f"{'':46} off {spread(step_s[1], ' s', 3)}")
    print(f"on ÷ off, all time:          {all_time}")
    print(f"on ÷ off, medians of blocks: {typical}")
    print(f"gate: {1000 * fmean(block.gate_s for block in on):.1f} ms of a step")
    print("processor time, ms of a step  on      off     more")
    cpu = {name: [1000 * fmean(block.cpu_s[name] for block in blocks) for blocks in (on, off)] for name in on[0].cpu_s}
    for name, (with_it, without) in cpu.items():
        print(f"  {name:24} {with_it:8.1f} {without:8.1f} {with_it - without:8.1f}")
    return {
        "ratio": asdict(all_time),
        "ratio_of_medians": asdict(typical),
        "cpu_ms": cpu,
        "pairs": [[asdict(block) for block in pair] for pair in pairs],
    }
