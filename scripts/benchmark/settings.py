"""Settings against each other in the default experiment: seconds of a step and of its parts, in alternation."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from scripts.benchmark.experiment import run_experiment
from scripts.benchmark.ratios import paired_ratio
from scripts.benchmark.step import StepTime, read_step_times

PARTS = ("wall", "rollout", "train", "publish")
Measured = dict[str, list[list[StepTime]]]


def measure(variants: Sequence[str], *, rounds: int, steps: int, seed: int = 0) -> Measured:
    """A variant is a line of settings, and of environment variables in capitals: `actor.threads=2 OMP_PROC_BIND=true`.

    Returns the steps of each run, by variant and round.
    """
    order = random.Random(seed)
    measured: Measured = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in order.sample(variants, len(variants)):
            measured[variant].append(one_run(variant, steps))
            typical = median(time.wall for time in measured[variant][-1])
            print(f"round {number}  {variant:50} {typical:.2f} s a step", flush=True)
    return measured


def one_run(variant: str, steps: int) -> list[StepTime]:
    words = variant.split()
    environment = dict(word.split("=", 1) for word in words if word.partition("=")[0].isupper())
    settings = [word for word in words if not word.partition("=")[0].isupper()]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        # the end of the epoch is far: a learning rate schedule is not what is measured
        overrides = [f"total_train_steps={steps}", "evaluator.freq_steps=100000", *settings]
        run = run_experiment(Path(folder), overrides, environment=environment)
        return read_step_times(run.paths)


def report(measured: Measured) -> dict[str, object]:
    """Medians of each variant's parts, and the ratio of each to the first variant's, round by round."""
    first, *others = measured
    typical = {
        variant: {part: [median(getattr(time, part) for time in run) for run in runs] for part in PARTS}
        for variant, runs in measured.items()
    }
    print(f"\nseconds, median of the runs' medians\n{'':50}" + "".join(f"{part:>10}" for part in PARTS))
    for variant, parts in typical.items():
        print(f"{variant:50}" + "".join(f"{median(parts[part]):10.3f}" for part in PARTS))
    ratios = {}
    for variant in others:
        ratios[variant] = {part: paired_ratio(typical[variant][part], typical[first][part]) for part in PARTS}
        told = ", ".join(f"{part} {ratio}" for part, ratio in ratios[variant].items())
        print(f"{variant} over {first}: {told}")
    return {
        "ratios": {variant: {part: asdict(r) for part, r in parts.items()} for variant, parts in ratios.items()},
        "steps": {variant: [[asdict(time) for time in run] for run in runs] for variant, runs in measured.items()},
    }
