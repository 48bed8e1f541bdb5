"""Benchmark `ahead`: the same run with rollouts ahead of the trainer (`rollout.max_head_offpolicyness`) and without.

One server with one thread, and a trainer with one: on two cores generation and training each have their own, and
each waits for the other where nothing is made ahead. The runs take turns, `--rounds` times, so that what else the
machine does meets all alike. A step lasts from one line of metrics.jsonl to the next; the first ten are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from launcher.run_files.journal import read_lines
from scripts.benchmark.experiment import run_experiment
from scripts.benchmark.ratios import paired_ratio, spread

WARM_UP = 10
OWN_CORES = (
    "sglang.n_servers=1",
    "sglang.threads=1",
    "actor.threads=1",
    "actor.use_decoupled_loss=true",
    "evaluator.freq_steps=100000",
    "recover.freq_secs=null",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadRun:
    """`step_s` are seconds of each step after the warm-up, `reward` the mean of every step, from the first one."""

    ahead: int
    step_s: tuple[float, ...]
    reward: tuple[float, ...]
    tokens_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4], help="batches ahead, of which one is 0")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is run")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    runs: list[AheadRun] = []
    for number in range(arguments.rounds):
        for ahead in arguments.ahead:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                overrides = [
                    *OWN_CORES,
                    f"seed={number + 1}",
                    f"total_train_steps={arguments.steps}",
                    f"rollout.max_head_offpolicyness={ahead}",
                    *arguments.overrides,
                ]
                runs.append(measured(ahead, list(read_lines(run_experiment(Path(folder), overrides).paths.metrics))))
            print(f"round {number}, {ahead} ahead: step {median(runs[-1].step_s):.3f} s", flush=True)
    return report(runs)


def measured(ahead: int, lines: Sequence[Mapping[str, object]]) -> AheadRun:
    """Of the lines of metrics.jsonl. Raises ValueError where there are too few steps."""
    if len(lines) < WARM_UP + 2:
        raise ValueError(f"{len(lines)} steps, of which {WARM_UP} are not counted: give more --steps")
    times = [float(str(line["time"])) for line in lines]
    lasted = tuple(after - before for before, after in pairwise(times))[WARM_UP:]
    tokens = sum(float(str(line["rollout/tokens"])) for line in lines[WARM_UP + 1 :])
    return AheadRun(
        ahead=ahead,
        step_s=lasted,
        reward=tuple(float(str(line["rollout/reward"])) for line in lines),
        tokens_per_s=tokens / sum(lasted),
    )


def report(runs: Sequence[AheadRun]) -> dict[str, object]:
    by_ahead = {ahead: [run for run in runs if run.ahead == ahead] for ahead in sorted({run.ahead for run in runs})}
    (least, without), *_ = by_ahead.items()
    print("ahead  seconds a step                         steps a minute ÷ none  tokens/s  reward: first, last 10 steps")
    ratios = {}
    for ahead, some in by_ahead.items():
        ratio = paired_ratio([fmean(run.step_s) for run in without], [fmean(run.step_s) for run in some])
        ratios[ahead] = asdict(ratio)
        reward = [fmean(fmean(run.reward[part]) for run in some) for part in (slice(10), slice(-10, None))]
        print(
            f"{ahead:5}  {spread([s for run in some for s in run.step_s], ' s', 3):38} "
            f"{'–' if ahead == least else ratio!s:22} {fmean(run.tokens_per_s for run in some):8,.0f}  "
            f"{reward[0]:.3f} → {reward[1]:.3f}"
        )
    return {"steps_a_minute_ratio": ratios, "runs": [asdict(run) for run in runs]}
