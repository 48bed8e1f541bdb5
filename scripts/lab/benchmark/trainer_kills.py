"""Benchmark `trainer_kills`: from a SIGKILL of the trainer to the next committed step, with a parked one and without.

Each run is a storm of T1 alone (scripts.storm): a kill at a random moment, some steps after the last recovery, whether
or not the next trainer is parked by then. Runs without and with one take turns: load that drifts meets both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from launcher.base.errors import RunError
from launcher.config.compose import compose
from launcher.reporting.run_facts import finite
from launcher.run_files.journal import read_events
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from scripts.faults.started_run import PRESET
from scripts.lab.benchmark.measured import Measured, Points
from scripts.lab.benchmark.supervision import SAME_WORK
from scripts.storm import SETTLE, run_under_faults

ARMS = {"cold": 0, "parked": 1}
"""Trainers that stand by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKill:
    """Seconds since the kill; `step_s`: the median step of its run. `load` when that run had ended."""

    arm: str
    after_s: float
    noticed_s: float | None
    step_s: float
    load: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10, help="with a parked trainer, and as many without")
    parser.add_argument("--runs", type=int, default=2, help="runs that these are divided over, of each kind")
    parser.add_argument("--gap", type=int, default=10, help="steps from a kill to the next, about")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")


def run(arguments: argparse.Namespace) -> Measured:
    kills, violations, took_over = list[TrainerKill](), list[str](), 0
    for number in range(arguments.runs):
        each, more = divmod(arguments.kills, arguments.runs)
        count = each + (number < more)
        for arm in ARMS if count else ():
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                steps = int((count + 1) * arguments.gap / SETTLE) + 3
                words = [PRESET, f"cluster.fileroot={folder}", *SAME_WORK, f"total_train_steps={steps}"]
                words += ["recover.freq_steps=2", "total_train_epochs=100", f"recovery.standby_trainers={ARMS[arm]}"]
                words += arguments.overrides
                made, found = in_one_run(words, arm, count, seed=arguments.seed + number)
                kills += made
                violations += found
                events = read_events(RunPaths.of(compose(words)).events)
                took_over += sum(event.get("event") == "trainer.took_over" for event in events)
            print(f"run {number}, {arm}: {len(kills)} kills so far", flush=True)
    if not kills:
        raise RunError("no step followed a kill, so nothing was measured", "a larger --gap leaves more steps")
    notes = [f"{took_over} kills were taken over by the parked trainer", *violations]
    return Measured(points=points_of(kills, violations), notes=notes, raw=[asdict(one) for one in kills])


def in_one_run(words: Sequence[str], arm: str, count: int, *, seed: int) -> tuple[list[TrainerKill], list[str]]:
    """Its kills, and what they lost. Raises RunError where the run takes no step."""
    result = run_under_faults(words, f"T1x{count}", seed=seed)
    violations = [*result.audit.doubts, *(["steps were undone"] * result.audit.taken_back)]
    violations += [f"exit code {result.exit_code}"] if result.exit_code else []
    step_s = median(finite(one.step_s for one in written_steps(RunPaths.of(compose(words)))))
    kills = [
        TrainerKill(arm=arm, after_s=one.next_step_s, noticed_s=one.noticed_s, step_s=step_s, load=os.getloadavg()[0])
        for one in result.outcomes
        if one.next_step_s is not None
    ]
    return kills, violations


def points_of(kills: Sequence[TrainerKill], violations: Sequence[str]) -> Points:
    """`lost`: committed steps that were lost or repeated, and runs that did not finish."""
    points = Points(lost=[float(len(violations))], kills=[float(len(kills))])
    for arm in ARMS:
        some = [kill for kill in kills if kill.arm == arm]
        points[f"{arm}_noticed_s"] = [kill.noticed_s for kill in some if kill.noticed_s is not None]
        points[f"{arm}_next_step_s"] = [kill.after_s for kill in some]
        points[f"{arm}_beyond_a_step_s"] = [kill.after_s - kill.step_s for kill in some]
    return points
