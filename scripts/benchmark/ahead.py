"""Benchmark `ahead`: the same run with rollouts ahead of the trainer (`rollout.max_head_offpolicyness`) and without.

One server with one thread, and a trainer with one: on two cores each finds its own, and each waits for the other where
nothing is made ahead. With `--apart` the servers are bound to the first half of the processors, and all else of the run
to the others. The runs take turns, `--rounds` times, so that what else the machine does meets all alike. A step lasts
from one line of metrics.jsonl to the next; the first ten are not counted.

With `--simulated` no run is started either: what staleness costs in reward at equal steps, of seeds 1 to so many, with
batches that are made by weights of an exact age (made_data/aged_rollouts.py).

With `--compared` no run is started: the trainer's part of a step is taken in turns by a model that compares older
tokens with the weights of their own version (gate.older_weights) and one that doesn't, on the same made batches, of two
servers and all one version old.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import psutil

from actors.model.policy_model import PolicyModel
from launcher.base.errors import UsageError
from launcher.base.rollouts import RolloutGroup
from launcher.config.compose import compose
from launcher.run_files.journal import Journal, Record, number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.made_data.aged_rollouts import AgedRun, learn
from scripts.benchmark.measured import Measured, Points, Ratio, paired_ratio
from scripts.benchmark.step import made_groups
from scripts.faults.started_run import FIRST_STEP_S, PRESET, Driver, short_lived, until, until_finished

WARM_UP = 10
OWN_CORES = (
    "sglang.n_servers=1",
    "sglang.threads=1",
    "actor.threads=1",
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
    parser.add_argument("--apart", action="store_true", help="generation and all else have processors of their own")
    parser.add_argument(
        "--simulated", type=int, help="seeds whose steps are taken without servers, for the reward alone"
    )
    parser.add_argument("--compared", type=int, help="steps on made batches, with and without the comparison")


def run(arguments: argparse.Namespace) -> Measured:
    if arguments.compared is not None:
        return compared(arguments.compared, arguments.overrides)
    if arguments.simulated is not None:
        return simulated(arguments.simulated, arguments.ahead, arguments.steps, arguments.overrides)
    runs: list[AheadRun] = []
    for number in range(arguments.rounds):
        for ahead in arguments.ahead:
            settings = [
                *OWN_CORES,
                f"seed={number + 1}",
                f"total_train_steps={arguments.steps}",
                f"rollout.max_head_offpolicyness={ahead}",
                *arguments.overrides,
            ]
            with apart(arguments.apart) as generating, short_lived(settings) as (paths, process):
                if generating:
                    _bind_servers(process, paths, generating)
                until_finished(process, paths)
                runs.append(read_run(ahead, list(read_lines(paths.metrics))))
            print(f"round {number}, {ahead} ahead: step {median(runs[-1].step_s):.3f} s", flush=True)
    return measured(runs)


@contextlib.contextmanager
def apart(is_wanted: bool) -> Iterator[set[int]]:
    """The processors that servers are to have, while this process, and what it starts, has the others; else none."""
    all_ = sorted(before := os.sched_getaffinity(0))
    if is_wanted and len(all_) < 2:
        raise UsageError("--apart needs two processors", f"there is {len(all_)}: leave it out")
    half = len(all_) // 2
    try:
        if is_wanted:
            os.sched_setaffinity(0, all_[half:])
        yield set(all_[:half]) if is_wanted else set()
    finally:
        os.sched_setaffinity(0, before)


def _bind_servers(process: Driver, paths: RunPaths, processors: set[int]) -> None:
    """Once the first step shows that all serve: each thread of each server's processes."""
    until(process, lambda: next(iter(read_lines(paths.metrics)), None), FIRST_STEP_S)
    ready = [line for line in read_lines(paths.events) if line["event"] == "server.ready"]
    for server in (psutil.Process(int(number_of(line["pid"]))) for line in ready):
        for one in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # what has ended needs no processor
                for thread in one.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, processors)


def read_run(ahead: int, lines: Sequence[Record]) -> AheadRun:
    """Of the lines of metrics.jsonl. Raises UsageError where there are too few steps."""
    if len(lines) < WARM_UP + 2:
        raise UsageError(f"{len(lines)} steps, of which {WARM_UP} are not counted", "give more --steps")
    lasted = tuple(after - before for before, after in pairwise(number_of(line["time"]) for line in lines))[WARM_UP:]
    tokens = sum(number_of(line["rollout/tokens"]) for line in lines[WARM_UP + 1 :])
    return AheadRun(
        ahead=ahead,
        step_s=lasted,
        reward=tuple(number_of(line["rollout/reward"]) for line in lines),
        tokens_per_s=tokens / sum(lasted),
    )


def measured(runs: Sequence[AheadRun]) -> Measured:
    """Ratios: steps a minute over those of the least that was made ahead, run by run."""
    by_ahead = {ahead: [run for run in runs if run.ahead == ahead] for ahead in sorted({run.ahead for run in runs})}
    (least, without), *_ = by_ahead.items()
    points, ratios = Points(), dict[str, Ratio]()
    for ahead, some in by_ahead.items():
        points |= {
            f"{ahead} ahead: step_s": [seconds for run in some for seconds in run.step_s],
            f"{ahead} ahead: tokens/s": [run.tokens_per_s for run in some],
            f"{ahead} ahead: reward of the first 10 steps": [fmean(run.reward[:10]) for run in some],
            f"{ahead} ahead: reward of the last 10 steps": [fmean(run.reward[-10:]) for run in some],
        }
        ratios[f"steps a minute, {ahead} ahead ÷ {least}"] = paired_ratio(
            [fmean(run.step_s) for run in without], [fmean(run.step_s) for run in some]
        )
    return Measured(points=points, ratios=ratios, raw=[asdict(run) for run in runs])


def simulated(seeds: int, ahead: Sequence[int], steps: int, overrides: Sequence[str]) -> Measured:
    """Of each seed a run for each of `ahead`."""
    runs: list[AgedRun] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "events.jsonl", 1, time.time)
        for seed in range(1, seeds + 1):
            config = compose([PRESET, f"seed={seed}", f"total_train_steps={steps}", *overrides])
            runs += [learn(config, journal, ahead=one, steps=steps) for one in ahead]
            print(f"seed {seed}: " + ", ".join(f"{one.ahead} ahead {one.held_out:.3f}" for one in runs[-len(ahead) :]))
    points = Points()
    for one in ahead:
        some = [run for run in runs if run.ahead == one]
        points[f"{one} ahead: held-out reward after {steps} steps"] = [run.held_out for run in some]
        points[f"{one} ahead: reward of the last 10 steps"] = [fmean(run.reward[-10:]) for run in some]
    return Measured(points=points, raw=[asdict(run) for run in runs])


def compared(times: int, overrides: Sequence[str]) -> Measured:
    """Seconds of forward, backward and optimizer step, after one by each way that warms up."""
    config, source = compose([PRESET, *overrides]), random.Random(0)
    ways = {
        way: PolicyModel(
            config.actor,
            config.ref,
            temperature=config.gconfig.temperature,
            total_steps=times + 1,
            tokenizer_path=config.tokenizer_path or None,
            older_versions=versions,
        )
        for way, versions in (("not compared", 0), ("compared", 1))
    }
    points = Points()
    most, n_samples = config.gconfig.max_new_tokens, config.gconfig.n_samples
    for version in range(times + 1):
        lengths = [
            [(12, source.randint(1, most)) for _ in range(n_samples)] for _ in range(config.train_dataset.batch_size)
        ]
        groups = [_aged(group, max(0, version - 1)) for group in made_groups(source, lengths)]
        for way, policy in ways.items():
            began = time.monotonic()
            policy.compute_gradients(groups)
            policy.commit()
            if version:
                points.setdefault(f"{way}: step_s", []).append(time.monotonic() - began)
    one, other = points["compared: step_s"], points["not compared: step_s"]
    return Measured(points=points, ratios={"a trainer's step, compared ÷ not": paired_ratio(one, other)})


def _aged(group: RolloutGroup, version: int) -> RolloutGroup:
    rollouts = [
        replace(one, completion=replace(one.completion, weight_version=version, server=f"server-{place % 2}"))
        for place, one in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(rollouts))
