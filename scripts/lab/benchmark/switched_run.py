"""A run whose supervision is off in some blocks of steps: `python -m scripts.lab.benchmark.switched_run [settings]`.

On: everything as always. Off: HealthMonitor and Coordinator are stopped by SIGSTOP, so that they neither look, probe,
ask nor decide, and the trainer neither scores known answers nor asks the gate. Whatever else there is, servers,
records, screen, is the same in both. The trainer itself switches, after a step is written down, by the number of the
next one. What is switched and which processor time was used by then goes into a file, line by line.

For measuring alone: nothing protects a run in an off block. The schedule comes by an environment variable, since it
is no setting of a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from actors.model.update_stats import UpdateStats
from actors.training.admission_gate import AdmissionGate
from actors.training.step_loop import GrpoLoop
from actors.training.trainer import Trainer
from launcher.base.disk_faults import Refusal
from launcher.base.messages import StepReport, TrainerReady
from launcher.base.rollouts import RolloutBatch
from launcher.policy.admission import Admission
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.lab.benchmark.timed_completions import run
from scripts.run_processes import find_run

SCHEDULE = "GRPO_BENCHMARK_SUPERVISION"
DONE = "supervision.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSchedule:
    """Steps before `first` and after the last pair are supervised; each pair is a block on and a block off, in an
    order drawn by `seed`."""

    first: int
    block: int
    pairs: int
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of the complete run."""
        return self.first + 2 * self.block * self.pairs + 1

    def block_of(self, step: int) -> int | None:
        """Its number, two to a pair."""
        number = (step - self.first) // self.block
        return number if 0 <= number < 2 * self.pairs else None

    def is_on(self, step: int) -> bool:
        number = self.block_of(step)
        if number is None:
            return True
        on_first = random.Random(f"{self.seed} {number // 2}").random() < 0.5
        return (number % 2 == 0) is on_first


def processor_seconds(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    used = {name: process.cpu_times() for name, process in processes.items()}
    return {name: times.user + times.system for name, times in used.items()}


class Switch:
    """Wraps the calls that a loop makes; is in the trainer's process."""

    def __init__(self, loop: GrpoLoop, paths: RunPaths, schedule: SwitchSchedule) -> None:
        self._gate, self._record = loop._gate, loop._record
        self._no_monitor = AdmissionGate(loop._config, loop._journal)
        loop._gate, loop._record = self, self.write
        self._loop = loop
        self._paths = paths
        self._schedule = schedule
        self._is_on = True
        self._gate_s = 0.0
        self._processes: dict[str, psutil.Process] = {}

    def check(self, batch: RolloutBatch, *, policy_version: int, global_step: int) -> Admission:
        gate = self._gate if self._is_on else self._no_monitor
        return gate.check(batch, policy_version=policy_version, global_step=global_step)

    def admit(self, batch: RolloutBatch, stats: UpdateStats) -> Admission:
        began = time.perf_counter()
        admission = (self._gate if self._is_on else self._no_monitor).admit(batch, stats)
        self._gate_s += time.perf_counter() - began
        return admission

    def rejected(self) -> None:
        self._gate.rejected()

    def write(self, report: StepReport, batch: RolloutBatch) -> Refusal | None:
        refusal = self._record(report, batch)
        step = report.global_step + 1
        if self._schedule.block_of(step) == self._schedule.block_of(step - 1):
            return refusal
        is_on = self._schedule.is_on(step)
        processes = self._processes = self._processes or self._find()
        for name in ("health_monitor", "coordinator"):
            processes[name].send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
        line = {"step": step, "on": is_on, "gate_s": self._gate_s, "cpu_s": processor_seconds(processes)}
        append_line(self._paths.logs / DONE, line)
        self._is_on, self._gate_s = is_on, 0.0
        return refusal

    def _find(self) -> dict[str, psutil.Process]:
        found = find_run(self._paths)
        pids = {name: process.pid for name, process in found.supervisors.items()}
        pids |= {"trainer": os.getpid(), "driver": found.driver.pid}
        for server in found.servers:
            for part in ("http", "scheduler", "detokenizer"):
                pids[f"{server.name} {part}"] = server.part(part)[0].pid
        return {name: psutil.Process(pid) for name, pid in pids.items()}


class SwitchedTrainer(Trainer.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc, name-defined]
    """The trainer's actor, with a switch in its step loop."""

    def start(self, *given: Any, **named: Any) -> TrainerReady:
        ready: TrainerReady = super().start(*given, **named)  # whatever the Coordinator gives the trainer's own
        Switch(self._training._loop, self._paths, SwitchSchedule(**json.loads(os.environ[SCHEDULE])))
        return ready

    start.__ray_concurrency_group__ = "train"  # type: ignore[attr-defined]  # as the method that it takes the place of


def environment(schedule: SwitchSchedule) -> dict[str, str]:
    return {SCHEDULE: json.dumps(asdict(schedule))}


if __name__ == "__main__":
    from scripts.lab.benchmark import switched_run  # by its name, so that Ray's workers find the class  # noqa: PLW0406

    sys.exit(run(switched_run.SwitchedTrainer))
