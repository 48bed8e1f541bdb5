"""What the supervision costs: `python -m scripts.lab.overhead`, steps with it against steps without it, in pairs of
blocks of one run (measured_run.py).

A step lasts from one line of metrics.jsonl to the next, so that everything is in it. The first step of a block is in
none: within it supervision is switched. The learning rate is next to nothing, so that steps stay equal work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median

from launcher.base.errors import UsageError
from launcher.run_files.journal import Record, number_of, read_lines
from scripts.faults.started_run import short_lived, until_finished
from scripts.lab.measured import Measured, command, mean_ratio
from scripts.lab.measured_run import SWITCHED, SwitchSchedule, environment

SAME_WORK = (
    "actor.optimizer.lr=1e-9",
    "evaluator.freq_steps=100000",
    "recover.freq_steps=null",
    "recover.first_steps=null",
    "recover.freq_secs=null",
    "health.supervisor_silence_s=3600",
)
"""And supervisors that stand still for a block of long steps are not replaced meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """Seconds of each step; `cpu_s` of each process and `gate_s` of the trainer, per step. `lasted_s`: the block, with
    the first step, which is not in `step_s`."""

    is_on: bool
    step_s: tuple[float, ...]
    lasted_s: float
    gate_s: float
    cpu_s: Mapping[str, float]


Pairs = Sequence[tuple[StepBlock, StepBlock]]
"""Of (on, off)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lab.overhead", description="What the supervision costs.")
    parser.add_argument("--pairs", type=int, default=34, help="pairs of blocks, one with and one without supervision")
    parser.add_argument("--block", type=int, default=6, help="steps in a block, of which the first is not counted")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the first block")
    parser.add_argument("--seed", type=int, default=0, help="seed for the order within the pairs")
    return command(parser, run)


def run(arguments: argparse.Namespace) -> Measured:
    if arguments.warm_up < 1:
        raise UsageError(f"--warm-up {arguments.warm_up}: a block begins behind a step", "give it 1 or more")
    schedule = SwitchSchedule(
        first=arguments.warm_up, block=arguments.block, pairs=arguments.pairs, seed=arguments.seed
    )
    settings = [*SAME_WORK, f"total_train_steps={schedule.steps}", *arguments.overrides]
    module, variables = "scripts.lab.measured_run", environment(schedule)
    with short_lived(settings, module=module, variables=variables) as (paths, process):
        until_finished(process, paths)
        return measured(pair_up(read_lines(paths.metrics), read_lines(paths.logs / SWITCHED), schedule))


def pair_up(metrics: Iterable[Record], switched: Iterable[Record], schedule: SwitchSchedule) -> Pairs:
    """`metrics` are lines of metrics.jsonl, `switched` those that the switch wrote, one where each block begins and
    one where the last ends. Raises ValueError where a block is not complete."""
    done_at = {int(number_of(line["global_step"])): number_of(line["time"]) for line in metrics}
    blocks = []
    for number, (begun, ended) in enumerate(pairwise(switched)):
        first = schedule.first + number * schedule.block
        last = first + schedule.block - 1
        if begun["step"] != first or ended["step"] != last + 1:
            raise ValueError(f"block {number} goes from step {begun['step']} to {ended['step']}: steps were repeated")
        blocks.append(
            StepBlock(
                is_on=bool(begun["on"]),
                step_s=tuple(done_at[step] - done_at[step - 1] for step in range(first + 1, last + 1)),
                lasted_s=done_at[last] - done_at[first - 1],
                gate_s=number_of(ended["gate_s"]) / schedule.block,
                cpu_s=_used(begun, ended, schedule.block),
            )
        )
    pairs = [tuple(sorted(pair, key=lambda b: not b.is_on)) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    return [(on, off) for on, off in pairs]


def _used(begun: Record, ended: Record, steps: int) -> dict[str, float]:
    before, after = begun["cpu_s"], ended["cpu_s"]
    assert isinstance(before, Mapping)
    assert isinstance(after, Mapping)
    return {name: (after[name] - before[name]) / steps for name in after}


def measured(pairs: Pairs) -> Measured:
    """`on ÷ off` of all time, and of the medians of blocks; processor time of a step, and of a second of the clock."""
    on, off = ([pair[side] for pair in pairs] for side in (0, 1))
    means = [[fmean(block.step_s) for block in blocks] for blocks in (on, off)]
    middles = [[median(block.step_s) for block in blocks] for blocks in (on, off)]
    ratio = mean_ratio(list(zip(*means, strict=True)))
    points = {
        "on_step_s": means[0],
        "off_step_s": means[1],
        "gate_s": [block.gate_s for block in on],
        "overhead": [ratio.value - 1],
        "overhead_by_pair": [with_it / without - 1 for with_it, without in zip(*means, strict=True)],
    }
    for name in on[0].cpu_s:
        for side, blocks in (("on", on), ("off", off)):
            points[f"{name} {side}_cpu_s"] = [block.cpu_s[name] for block in blocks]
            shares = [block.cpu_s[name] * (len(block.step_s) + 1) / block.lasted_s for block in blocks]
            points[f"{name} {side}_cpu_share"] = shares
    ratios = {"on ÷ off, all time": ratio, "on ÷ off, medians of blocks": mean_ratio(list(zip(*middles, strict=True)))}
    return Measured(points=points, ratios=ratios, raw=[[asdict(block) for block in pair] for pair in pairs])


if __name__ == "__main__":
    sys.exit(main())
