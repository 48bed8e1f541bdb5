"""A run that measures itself, for measuring alone: `python -m scripts.lab.measured_run [settings]`.

By itself it writes down when each part of a completion arrives (TOKENS). With a schedule in the environment, since that
is no setting of a run, its supervision is off in some blocks of steps (SWITCHED). On: everything as always. Off:
HealthMonitor and Coordinator are stopped by SIGSTOP, so that they neither look, probe, ask nor decide, and the trainer
neither scores known answers nor asks the gate. Whatever else there is, servers, records, screen, is the same in both.
The trainer itself switches, after a step is written down, by the number of the next one. Nothing protects a run in an
off block.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import ray

from actors.model.update_stats import UpdateStats
from actors.rollout.request_loop import GroupProgress
from actors.serving import completions
from actors.supervision import run_actors
from actors.training.admission_gate import AdmissionGate
from actors.training.step_loop import GrpoLoop
from actors.training.trainer import Trainer
from launcher import driver
from launcher.base.disk_faults import Refusal
from launcher.base.messages import StepReport, TrainerReady
from launcher.base.rollouts import Completion, RolloutBatch
from launcher.config.compose import compose
from launcher.policy.admission import Admission
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.run_processes import find_run

SCHEDULE = "GRPO_BENCHMARK_SUPERVISION"
SWITCHED = "supervision.jsonl"
TOKENS = "tokens.jsonl"
IS_AGAIN = ContextVar("is_again", default=False)
"""Whether the request of this task asks for what an earlier one has not brought to its end."""


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
        self._gate = loop._gate
        self._record = loop._record
        self._no_monitor = AdmissionGate(loop._config, loop._journal)
        loop._gate = self
        loop._record = self.write
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
        append_line(self._paths.logs / SWITCHED, line)
        self._is_on = is_on
        self._gate_s = 0.0
        return refusal

    def _find(self) -> dict[str, psutil.Process]:
        found = find_run(self._paths)
        pids = {name: process.pid for name, process in found.supervisors.items()}
        pids |= {"trainer": os.getpid(), "driver": found.driver.pid}
        for server in found.servers:
            for part in ("http", "scheduler", "detokenizer"):
                pids[f"{server.name} {part}"] = server.part(part)[0].pid
        return {name: psutil.Process(pid) for name, pid in pids.items()}


def write_down_tokens(paths: RunPaths) -> None:
    """From now on, in this process: a line for each part of a rollout's completions."""
    file = (paths.logs / TOKENS).open("a", buffering=1)
    read, ask = completions.completion_from, GroupProgress.request
    asked: dict[int, object] = {}  # the samplings of each group; kept, so that no id is reused

    def request(progress: GroupProgress) -> Any:
        """Called in the task that sends it, which reads the answer too."""
        samplings = progress._samplings
        IS_AGAIN.set(id(samplings) in asked)
        asked[id(samplings)] = samplings
        return ask(progress)

    def timed(answer: Mapping[str, Any], *, server: str, **named: Any) -> Completion:
        made = read(answer, server=server, **named)
        line = {"monotonic": time.monotonic(), "server": server, "version": made.weight_version}
        line["is_again"] = IS_AGAIN.get()
        file.write(json.dumps(line) + "\n")
        return made

    completions.completion_from = timed
    GroupProgress.request = request  # type: ignore[method-assign, assignment]


class MeasuredTrainer(Trainer.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc, name-defined]
    """The trainer's actor, which measures."""

    def start(self, *given: Any, **named: Any) -> TrainerReady:
        ready: TrainerReady = super().start(*given, **named)  # whatever the Coordinator gives the trainer's own
        if schedule := os.environ.get(SCHEDULE):
            Switch(self._training._loop, self._paths, SwitchSchedule(**json.loads(schedule)))
        else:
            write_down_tokens(self._paths)
        return ready

    start.__ray_concurrency_group__ = "train"  # type: ignore[attr-defined]  # as the method that it takes the place of


def environment(schedule: SwitchSchedule) -> dict[str, str]:
    return {SCHEDULE: json.dumps(asdict(schedule))}


def run(trainer: type) -> int:
    """A run of the command line's settings with another class for its trainer."""
    run_actors.Trainer = ray.remote(concurrency_groups={"train": 1, "ctl": 4, "mend": 16})(trainer)  # type: ignore
    return driver.run(compose(sys.argv[1:]))


if __name__ == "__main__":
    from scripts.lab import measured_run  # by its name, so that Ray's workers find the class  # noqa: PLW0406

    sys.exit(run(measured_run.MeasuredTrainer))
