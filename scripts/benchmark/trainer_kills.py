"""Benchmark `trainer_kills`: from a SIGKILL of the trainer to the next committed step, with a parked one and without.

Runs take turns, without and with one, with some kills each: load that drifts meets both. A kill comes some steps after
the last recovery, at a random moment of a step, whether or not the next trainer is parked by then. A step is committed
at the time in its line of metrics.jsonl. What was lost is counted in the ledger.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import psutil

from launcher.base.errors import RunError
from launcher.config.compose import compose
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.experiment import PRESET
from scripts.benchmark.ratios import spread
from scripts.faults.run_processes import find_run
from scripts.storm import END_S, committed, started, until_committed

SAME_WORK = ("actor.optimizer.lr=1e-9", "evaluator.freq_steps=100000", "total_train_epochs=100")
MARKS = {
    "noticed": "trainer.died",
    "process": "trainer.restarted",
    "state": "trainer.loaded",
    "first server": "server.ready",
    "resumed": "trainer.resumed",
}
"""The event at which each part of a recovery has ended."""
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Seconds since the kill; `step_s`: the median step of the run before it. `parked_mib`: of the parked process,
    resident and proportional; `parked_cpu`: the share of a core that it used in the last second before."""

    after_s: float
    parts_s: Mapping[str, float]
    step_s: float
    took_over: bool
    load: float
    parked_mib: tuple[float, float] | None
    parked_cpu: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10, help="with a parked trainer, and as many without")
    parser.add_argument("--runs", type=int, default=2, help="runs that these are divided over, of each kind")
    parser.add_argument("--gap", type=int, default=10, help="steps between a recovery and the next kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    kills: dict[bool, list[Kill]] = {False: [], True: []}
    for number in range(arguments.runs):
        each, more = divmod(arguments.kills, arguments.runs)
        for is_on, all_of_them in kills.items():
            draw = random.Random(f"{arguments.seed} {number} {is_on}")
            all_of_them += in_one_run(is_on, each + (number < more), arguments.gap, draw, arguments.overrides)
            print(f"run {number}, standby_trainers={int(is_on)}: {len(all_of_them)} kills so far", flush=True)
    return report(kills)


def in_one_run(is_on: bool, count: int, gap: int, draw: random.Random, overrides: Sequence[str]) -> list[Kill]:
    """Raises RunError where a kill lost something, or the run failed."""
    steps = f"total_train_steps={(count + 1) * (gap + 2)}"
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        words = [PRESET, f"cluster.fileroot={folder}", *SAME_WORK, steps]
        words += [f"recovery.standby_trainers={int(is_on)}", *overrides]
        paths, kills, done = RunPaths.of(compose(words)), list[Kill](), 1
        with started(words, paths) as process:
            for _ in range(count):
                until_committed(process, paths, done + gap)
                kills.append(kill(process, paths, draw))
                done = committed(paths)
            exit_code = process.wait(END_S)
        found = read_facts(paths).audit
        if exit_code or found is None or found.problems or found.taken_back:
            raise RunError(f"the run ended with {exit_code} after {count} kills", f"its ledger: {found}")
    return kills


def kill(process: subprocess.Popen[bytes], paths: RunPaths, draw: random.Random) -> Kill:
    step_s = median(float(str(line["timeperf/step_s"])) for line in read_lines(paths.metrics))
    found = find_run(paths)
    if found.trainer is None:
        raise RunError("the run has no trainer to kill", f"see {paths.fileroot}/console.log")
    parked = None if found.standby_trainer is None else psutil.Process(found.standby_trainer.pid)
    memory = None if parked is None else parked.memory_full_info()
    cpu = None if parked is None else parked.cpu_percent(interval=1.0) / 100
    time.sleep(draw.uniform(0.0, step_s))
    before, killed_at = committed(paths), time.time()
    os.kill(found.trainer.pid, signal.SIGKILL)
    until_committed(process, paths, before + 1)
    line = list(read_lines(paths.metrics))[before]
    events = [event for event in read_lines(paths.events) if float(str(event["time"])) > killed_at]
    return Kill(
        after_s=float(str(line["time"])) - killed_at,
        parts_s={part: _first(events, name) - killed_at for part, name in MARKS.items()},
        step_s=step_s,
        took_over=any(event["event"] == "trainer.took_over" for event in events),
        load=os.getloadavg()[0],
        parked_mib=None if memory is None else (memory.rss / MIB, memory.pss / MIB),
        parked_cpu=cpu,
    )


def _first(events: Sequence[Record], name: str) -> float:
    for event in events:
        if event["event"] == name:
            return float(str(event["time"]))
    raise RunError(f"the run stepped again without {name}", "the trainer was not the one that was killed")


def report(kills: Mapping[bool, Sequence[Kill]]) -> dict[str, object]:
    for is_on, some in kills.items():
        beyond = [kill.after_s - kill.step_s for kill in some]
        print(f"\nstandby_trainers={int(is_on)}: {len(some)} kills, {sum(kill.took_over for kill in some)} taken over")
        print(f"  to the next committed step {spread([kill.after_s for kill in some], ' s', 2)}")
        print(f"  beyond one median step     {spread(beyond, ' s', 2)}")
        before = [0.0] * len(some)
        for part in MARKS:
            until = [kill.parts_s[part] for kill in some]
            print(f"    {part:14} {spread([end - begin for begin, end in zip(before, until, strict=True)], ' s', 2)}")
            before = until
        rest = [kill.after_s - begin for kill, begin in zip(some, before, strict=True)]
        print(f"    {'step':14} {spread(rest, ' s', 2)}")
        parked = [kill.parked_mib for kill in some if kill.parked_mib is not None]
        if parked:
            print(f"  parked process: resident {spread([one[0] for one in parked], ' MiB', 0)}")
            print(f"    its share of what is shared counted once {spread([one[1] for one in parked], ' MiB', 0)}")
            print(f"    of a core {spread([kill.parked_cpu or 0.0 for kill in some], '', 3)}")
    return {f"standby_trainers={int(is_on)}": [asdict(kill) for kill in some] for is_on, some in kills.items()}
