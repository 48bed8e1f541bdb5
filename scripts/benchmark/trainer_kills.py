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
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from launcher.config.compose import compose
from launcher.reporting.ledger_audit import audit
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.experiment import PRESET, run_experiment
from scripts.benchmark.ratios import spread
from scripts.faults.run_processes import find_run

SAME_WORK = ("actor.optimizer.lr=1e-9", "evaluator.freq_steps=100000", "total_train_epochs=100")
MARKS = {
    "noticed": "trainer.died",
    "process": "trainer.restarted",
    "state": "trainer.loaded",
    "first server": "server.ready",
    "resumed": "trainer.resumed",
}
"""The event at which each part of a recovery has ended."""
WAIT_S, LOOK_S = 300.0, 0.05
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
        for is_on in (False, True):
            killer = Killer(
                arguments, random.Random(f"{arguments.seed} {number} {is_on}"), count=_share(arguments, number)
            )
            kills[is_on] += killer.in_one_run(is_on, arguments.overrides)
            print(f"run {number}, standby_trainers={int(is_on)}: {len(kills[is_on])} kills so far", flush=True)
    return report(kills)


def _share(arguments: argparse.Namespace, number: int) -> int:
    """Kills of the `number`-th run."""
    each, more = divmod(arguments.kills, arguments.runs)
    return int(each + (number < more))


class Killer:
    """Kills beside a run, from a thread of its own."""

    def __init__(self, arguments: argparse.Namespace, draw: random.Random, *, count: int) -> None:
        self._gap = arguments.gap
        self._draw = draw
        self._count = count
        self._kills: list[Kill] = []
        self._error: Exception | None = None

    def in_one_run(self, is_on: bool, overrides: Sequence[str]) -> list[Kill]:
        """Raises RuntimeError where a kill lost something, or the run failed."""
        steps = (self._count + 1) * (self._gap + 2)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            words = [*SAME_WORK, f"total_train_steps={steps}", f"recovery.standby_trainers={int(is_on)}", *overrides]
            paths = RunPaths.of(compose([PRESET, f"cluster.fileroot={folder}", *words]))
            thread = threading.Thread(target=self._kill_all, args=(paths,), daemon=True)
            thread.start()
            run_experiment(Path(folder), words)
            thread.join()
            if self._error is not None:
                raise self._error
            prompts = next(
                event["prompts"] for event in read_lines(paths.events) if event["event"] == "trainer.started"
            )
            whole = audit(list(read_lines(paths.ledger)), list(read_lines(paths.metrics)), prompts=int(str(prompts)))
            if whole.problems or whole.taken_back or len(self._kills) != self._count:
                raise RuntimeError(f"{len(self._kills)} kills of {self._count}, and the ledger is not whole: {whole}")
        return self._kills

    def _kill_all(self, paths: RunPaths) -> None:
        try:
            done = 1
            for _ in range(self._count):
                done = self._wait_for_steps(paths, done + self._gap)
                self._kills.append(self._kill(paths))
                done += 1
        except Exception as error:  # noqa: BLE001 - raised again where the run has ended
            self._error = error

    def _kill(self, paths: RunPaths) -> Kill:
        step_s = median(float(str(line["timeperf/step_s"])) for line in read_lines(paths.metrics))
        found = find_run(paths)
        if found.trainer is None:
            raise RuntimeError("the run has no trainer to kill")
        parked = None if found.standby_trainer is None else psutil.Process(found.standby_trainer.pid)
        memory = None if parked is None else parked.memory_full_info()
        cpu = None if parked is None else parked.cpu_percent(interval=1.0) / 100
        time.sleep(self._draw.uniform(0.0, step_s))
        before, killed_at = _steps(paths), time.time()
        os.kill(found.trainer.pid, signal.SIGKILL)
        self._wait_for_steps(paths, before + 1)
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

    def _wait_for_steps(self, paths: RunPaths, count: int) -> int:
        give_up_at = time.monotonic() + WAIT_S
        while (done := _steps(paths)) < count:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"{done} steps after {WAIT_S:g} s, {count} were waited for")
            time.sleep(LOOK_S)
        return done


def _steps(paths: RunPaths) -> int:
    return sum(1 for _ in read_lines(paths.metrics)) if paths.metrics.exists() else 0


def _first(events: Sequence[Record], name: str) -> float:
    return next(float(str(event["time"])) for event in events if event["event"] == name)


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
