"""How the time of a step is spent, from metrics.jsonl: generation, training, and what is neither.

A step lasts from one line to the next, so that all is in it: the gate, the records, the checkpoint. Steps in which the
held-out set was evaluated are left out, and so is the first of each attempt, whose beginning has no line.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.experiment import run_experiment
from scripts.benchmark.ratios import spread

PARTS = ("rollout", "train", "publish", "checkpoint", "state", "rest", "neither")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=Path, help="the logs folder of an existing run; without it a new run is started")
    parser.add_argument("--steps", type=int, default=60, help="steps of the new run")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.logs is not None:
        paths = RunPaths.of_logs(arguments.logs.absolute())
        if paths is None:
            raise ValueError(f"--logs {arguments.logs} is not …/logs/<user>/<experiment>/<trial>")
        return report(read_step_times(paths))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        made = run_experiment(Path(folder), [f"total_train_steps={arguments.steps}", *arguments.overrides])
        return report(read_step_times(made.paths))


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
        began, ended = _number(before, "time"), _number(line, "time")
        if not _follows(before, line) or any(began < at <= ended for at in evaluated_at):
            continue
        times.append(
            StepTime(
                global_step=int(_number(line, "global_step")),
                wall=ended - began,
                rollout=_number(line, "timeperf/rollout_s"),
                train=_number(line, "timeperf/train_s"),
                publish=_number(line, "timeperf/publish_s"),
                checkpoint=_number(line, "timeperf/checkpoint_s"),
                state=_number({"timeperf/state_s": 0.0} | dict(line), "timeperf/state_s"),  # older runs have none
            )
        )
    return times


def _follows(before: Record, line: Record) -> bool:
    """In one incarnation of the trainer: else what happened between the two belongs to no step."""
    next_step = _number(before, "global_step") + 1
    return before["attempt"] == line["attempt"] and _number(line, "global_step") == next_step


def _number(line: Record, key: str) -> float:
    return float(str(line[key]))


def read_step_times(paths: RunPaths) -> list[StepTime]:
    evaluated = [_number(event, "time") for event in read_lines(paths.events) if event["event"] == "eval.done"]
    return step_times(read_lines(paths.metrics), evaluated)


def shares(times: Sequence[StepTime]) -> dict[str, float]:
    """Of the wall time of all steps together."""
    wall = sum(time.wall for time in times)
    return {part: sum(getattr(time, part) for time in times) / wall for part in PARTS}


def report(times: Sequence[StepTime]) -> dict[str, object]:
    if not times:
        raise ValueError("two lines of one attempt in metrics.jsonl make one step; there are none")
    share = shares(times)
    print(f"{len(times)} steps of {spread([time.wall for time in times], ' s')}")
    for part, of_wall in share.items():
        seconds = [getattr(time, part) for time in times]
        print(f"  {part:12} {100 * of_wall:5.1f} %   {spread(seconds, ' s', 3)}")
    each = [time.neither / time.wall for time in times]
    print(
        f"neither generation nor training: {100 * share['neither']:.1f} % of all, {100 * median(each):.1f} % of a step"
    )
    return {"shares": share, "median_share_of_a_step": median(each), "steps": [asdict(time) for time in times]}
