"""How the time of a step is spent, from metrics.jsonl: generation, training, and what is neither.

A step lasts from one line to the next, so that all is in it: the gate, the records, the checkpoint. Steps in which the
held-out set was evaluated are left out, and so is the first of each attempt, whose beginning has no line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.run_files.journal import Record, number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.measured import Measured
from scripts.faults.started_run import short_lived, until_finished

PARTS = ("rollout", "train", "publish", "checkpoint", "state", "rest", "neither")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=Path, help="the logs folder of an existing run; without it a new run is started")
    parser.add_argument("--steps", type=int, default=60, help="steps of the new run")


def run(arguments: argparse.Namespace) -> Measured:
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
