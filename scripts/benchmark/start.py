"""Benchmark `start`: seconds from the command to the first optimizer step, each time in a new folder."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from launcher.run_files.journal import read_lines
from scripts.benchmark.experiment import Run, cpu_seconds_of, run_experiment
from scripts.benchmark.ratios import spread

SAID = re.compile(r"\[ *[\d.]+ s\] (.*)")
FIRST_STEP = "first optimizer step"
EVALUATED = "held-out accuracy"
SHORT = (
    ("starting", "Ray is up"),
    ("trainer ready", "trainer ready"),
    ("server-0 READY", "server ready"),
    (EVALUATED, "evaluated before"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds since the command at which each milestone was reached; `cpu_s` of all its processes until about then."""

    milestones: dict[str, float]
    cpu_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=5, help="how often the command is run")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    starts = []
    for number in range(arguments.times):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            starts.append(one_start(Path(folder), arguments.overrides))
        print(f"start {number}: {_line(starts[-1])}", flush=True)
    return report(starts)


def one_start(fileroot: Path, overrides: Sequence[str]) -> Start:
    cpu: list[float] = []

    def look(mark: str, line: str) -> None:
        if EVALUATED in line:  # twice: before the first step, and after it
            cpu.append(cpu_seconds_of(mark))

    run = run_experiment(fileroot, ["total_train_steps=1", *overrides], on_line=look)
    return Start(milestones=milestones(run), cpu_s=cpu[-1] if cpu else float("nan"))


def milestones(run: Run) -> dict[str, float]:
    """What the run printed, by when it did, and the time written into the first step's line."""
    reached: dict[str, float] = {}
    for seconds, line in run.said:
        found = SAID.match(line)
        text = found[1] if found else line
        for beginning, name in SHORT:
            if text.startswith(beginning) and name not in reached:
                reached[name] = seconds
    (first, *_) = read_lines(run.paths.metrics)
    reached[FIRST_STEP] = float(str(first["time"])) - run.began
    return reached


def _line(start: Start) -> str:
    steps = sorted(start.milestones.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in steps) + f"; {start.cpu_s:.1f} s of processor"


def report(starts: Sequence[Start]) -> dict[str, object]:
    names = starts[0].milestones
    figures = {name: [start.milestones[name] for start in starts if name in start.milestones] for name in names}
    print("\nseconds since the command")
    for name, seconds in sorted(figures.items(), key=lambda item: median(item[1])):
        print(f"  {name:22} {spread(seconds, ' s', 1)}")
    print(f"  {'processor time':22} {spread([start.cpu_s for start in starts], ' s', 1)}")
    return {
        "median_s": {name: median(seconds) for name, seconds in figures.items()},
        "starts": [asdict(start) for start in starts],
    }
