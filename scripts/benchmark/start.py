"""Benchmark `start`: seconds from the command to the first optimizer step, each time in a new folder."""

from __future__ import annotations

import argparse
import time

from launcher.run_files.journal import number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.measured import Measured, Points
from scripts.faults.started_run import short_lived, until_finished

MILESTONES = {
    "run.started": "ray_is_up_s",
    "trainer.started": "trainer_ready_s",
    "server.ready": "server_ready_s",
    "eval.done": "evaluated_before_s",
}
"""By the event of which the first one says that it was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=5, help="how often the command is run")


def run(arguments: argparse.Namespace) -> Measured:
    points = Points()
    for number in range(arguments.times):
        began = time.time()
        with short_lived(["total_train_steps=1", *arguments.overrides]) as (paths, process):
            until_finished(process, paths)
            reached = milestones(paths)
        for name, at in reached.items():
            points.setdefault(name, []).append(at - began)
        print(f"start {number}: {points['first_step_s'][-1]:.1f} s to the first step", flush=True)
    return Measured(points=points)


def milestones(paths: RunPaths) -> dict[str, float]:
    """Unix seconds at which the run reached each."""
    reached: dict[str, float] = {}
    for event in read_lines(paths.events):
        if (name := MILESTONES.get(str(event.get("event")))) is not None:
            reached.setdefault(name, number_of(event["time"]))
    (first, *_) = read_lines(paths.metrics)
    return reached | {"first_step_s": number_of(first["time"])}
