"""Benchmark `trainer_kills`: from a SIGKILL of the trainer to the next committed step, with a parked one and without.

Each run is a storm of T1 alone (scripts.storm): a kill at a random moment, some steps after the last recovery, whether
or not the next trainer is parked by then. Runs without and with one take turns: load that drifts meets both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from launcher.config.compose import compose
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.experiment import PRESET
from scripts.benchmark.ratios import spread
from scripts.benchmark.supervision import SAME_WORK
from scripts.storm import SETTLE, run_under_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Seconds since the kill; `step_s`: the median step of its run. `load` when that run had ended."""

    after_s: float
    noticed_s: float | None
    step_s: float
    load: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10, help="with a parked trainer, and as many without")
    parser.add_argument("--runs", type=int, default=2, help="runs that these are divided over, of each kind")
    parser.add_argument("--gap", type=int, default=10, help="steps from a kill to the next, about")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    kills: dict[bool, list[Kill]] = {False: [], True: []}
    took_over, violations = 0, list[str]()
    for number in range(arguments.runs):
        each, more = divmod(arguments.kills, arguments.runs)
        count = each + (number < more)
        for is_on, all_of_them in kills.items() if count else ():
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                steps = int((count + 1) * arguments.gap / SETTLE) + 3
                words = [PRESET, f"cluster.fileroot={folder}", *SAME_WORK, f"total_train_steps={steps}"]
                words += ["recover.freq_steps=2", "total_train_epochs=100", f"recovery.standby_trainers={int(is_on)}"]
                words += arguments.overrides
                made, found = in_one_run(words, count, seed=arguments.seed + number)
                all_of_them += made
                violations += found
                events = read_lines(RunPaths.of(compose(words)).events)
                took_over += sum(event.get("event") == "trainer.took_over" for event in events)
            print(f"run {number}, standby_trainers={int(is_on)}: {len(all_of_them)} kills so far", flush=True)
    print(f"{took_over} of {len(kills[True])} were taken over by the parked one")
    print(f"committed steps lost or repeated, and runs that did not finish: {'; '.join(violations) or 'none'}")
    return {**report(kills), "violations": violations}


def in_one_run(words: Sequence[str], count: int, *, seed: int) -> tuple[list[Kill], list[str]]:
    """Its kills, and what they lost. Raises RunError where the run takes no step."""
    result = run_under_faults(words, f"T1x{count}", seed=seed)
    violations = [*result.audit.problems, *(["steps were undone"] * result.audit.taken_back)]
    violations += [f"exit code {result.exit_code}"] if result.exit_code else []
    step_s = median(float(str(line["timeperf/step_s"])) for line in read_lines(RunPaths.of(compose(words)).metrics))
    kills = [
        Kill(after_s=one.next_step_s, noticed_s=one.noticed_s, step_s=step_s, load=os.getloadavg()[0])
        for one in result.outcomes
        if one.next_step_s is not None
    ]
    return kills, violations


def report(kills: Mapping[bool, Sequence[Kill]]) -> dict[str, object]:
    for is_on, some in kills.items():
        print(f"\nstandby_trainers={int(is_on)}: {len(some)} kills")
        noticed = [kill.noticed_s for kill in some if kill.noticed_s is not None]
        print(f"  noticed                    {spread(noticed, ' s', 2)}")
        print(f"  to the next committed step {spread([kill.after_s for kill in some], ' s', 2)}")
        print(f"  beyond one median step     {spread([kill.after_s - kill.step_s for kill in some], ' s', 2)}")
    return {f"standby_trainers={int(is_on)}": [asdict(kill) for kill in some] for is_on, some in kills.items()}
