"""Runs the trials of a sweep: starts each one that has not ended before, as many at a time as there is room for.

    ended before   ─► its result
    wrong settings ─► REFUSED, found before anything was started
    all others     ─► a process each, as many at a time as there are slots ─► its status, or CUT OFF

A trial's end is never the sweep's. It has one thread and no Ray: what a trial's run does to its process, its cluster or
its memory stays there.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import LauncherError, UsageError
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.cli.interrupts import Interrupts
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths
from launcher.sweep.sweep_trials import SweepTrial
from launcher.sweep.trial_capacity import TrialCapacity
from launcher.sweep.trial_process import TrialProcess
from launcher.sweep.trial_results import TrialResult, TrialStatus, result_of, settled

POLL_S = 0.1
END_WITHIN_S = 60.0
"""After a second interrupt; what has not ended by then is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCandidate:
    """A trial and its settings, or why they can't be used. `marked`: the settings that its run fits."""

    trial: SweepTrial
    config: RunConfig | None
    refusal: LauncherError | None = None
    marked: tuple[str, ...] = ()

    @property
    def settings(self) -> RunConfig:
        assert self.config is not None
        return self.config

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.settings)


@dataclass(slots=True, kw_only=True)
class Running:
    """A trial whose process runs. `slot`: which of the capacity's; `began`: on the monotonic clock."""

    candidate: TrialCandidate
    process: TrialProcess
    slot: int
    began: float


class SweepRun:
    """`command`: of a single run, without its overrides. `say`: a line to the user."""

    def __init__(
        self,
        candidates: Sequence[TrialCandidate],
        command: Sequence[str],
        folder: Path,
        capacity: TrialCapacity,
        say: Callable[[str], None],
        *,
        retry: bool,
    ) -> None:
        self._candidates = list(candidates)
        self._command = tuple(command)
        self._folder = folder
        self._capacity = capacity
        self._say = say
        self._retry = retry
        self._interrupts = Interrupts()
        self._results: dict[str, TrialResult] = {}
        self._waiting: list[TrialCandidate] = []
        self._running: list[Running] = []
        self._told_held: set[str] = set()

    @property
    def was_interrupted(self) -> bool:
        return self._interrupts.asked

    def run(self) -> list[TrialResult]:
        """Every trial's result, in their order."""
        for candidate in self._candidates:
            self._take_earlier(candidate)
        with self._interrupts:
            try:
                self._until_all_ended()
            except KeyboardInterrupt:
                self._end_at_once()
            finally:
                for one in self._running:  # only where the sweep itself broke: nobody is left to end them
                    one.process.interrupt()
        for candidate in self._waiting:
            self._results[candidate.trial.name] = TrialResult(trial=candidate.trial, status=TrialStatus.NOT_RUN)
        return [self._results[candidate.trial.name] for candidate in self._candidates]

    def _take_earlier(self, candidate: TrialCandidate) -> None:
        trial = candidate.trial
        if candidate.config is None:
            reason = " ".join(candidate.refusal.message.split()) if candidate.refusal is not None else ""
            self._end(candidate, TrialResult(trial=trial, status=TrialStatus.REFUSED, reason=reason))
        elif not is_held(candidate.paths) and settled(candidate.config, candidate.paths, retry=self._retry):
            self._end(candidate, result_of(trial, candidate.paths), was="already ")
        else:
            self._waiting.append(candidate)

    def _until_all_ended(self) -> None:
        passed_on = False
        while self._running or (self._waiting and not self._interrupts.asked):
            if self._interrupts.asked and not passed_on:
                passed_on = True
                self._say("stopping: each trial finishes the step under way and saves")
                for one in self._running:
                    one.process.interrupt()
            elif not self._interrupts.asked:
                self._start_next()
            self._take_ended()
            time.sleep(POLL_S)

    def _start_next(self) -> None:
        free = sorted(set(range(len(self._capacity.slots))) - {one.slot for one in self._running})
        ready = [candidate for candidate in self._waiting if self._is_free(candidate)]
        if not free or not ready:
            return
        candidate, slot = ready[0], free[0]
        self._waiting.remove(candidate)
        log = self._folder / f"{candidate.trial.name}.log"
        process = TrialProcess([*self._command, *candidate.trial.overrides], log, self._environment(slot))
        self._running.append(Running(candidate=candidate, process=process, slot=slot, began=time.monotonic()))
        self._say(f"{self._number(candidate)} {candidate.trial}: started (pid {process.pid})")

    def _is_free(self, candidate: TrialCandidate) -> bool:
        """Not while an earlier sweep's run of it is still ending."""
        if not is_held(candidate.paths):
            return True
        if candidate.trial.name not in self._told_held:
            self._told_held.add(candidate.trial.name)
            self._say(f"{self._number(candidate)} {candidate.trial}: waits until its earlier run has ended")
        return False

    def _environment(self, slot: int) -> Mapping[str, str]:
        gpus = visible_gpus(self._capacity.slots[slot])
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}

    def _take_ended(self) -> None:
        for one in list(self._running):
            code = one.process.exit_code()
            if code is not None:
                self._running.remove(one)
                self._end(one.candidate, self._result(one, code), f" after {time.monotonic() - one.began:.0f} s")

    def _result(self, one: Running, code: int) -> TrialResult:
        trial, paths = one.candidate.trial, one.candidate.paths
        if code == EXIT_CODES[TerminalStatus.FINISHED] or settled(one.candidate.settings, paths, retry=False):
            return result_of(trial, paths)
        if code == UsageError.exit_code:
            return TrialResult(trial=trial, status=TrialStatus.REFUSED, reason=one.process.refusal())
        output = f"exit code {code}: {one.process.last_lines()}"
        return result_of(trial, paths, output=output)

    def _end(self, candidate: TrialCandidate, result: TrialResult, after: str = "", was: str = "") -> None:
        self._results[result.trial.name] = result
        figure = f", {result.step_s:.2f} s a step" if result.step_s is not None else ""
        why = f": {result.reason}" if result.status is not TrialStatus.FINISHED else ""
        self._say(f"{self._number(candidate)} {result.trial}: {was}{result.status}{after}{figure}{why}")

    def _number(self, candidate: TrialCandidate) -> str:
        return f"[{self._candidates.index(candidate) + 1}/{len(self._candidates)}]"

    def _end_at_once(self) -> None:
        for one in self._running:
            one.process.interrupt()
        give_up_at = time.monotonic() + END_WITHIN_S
        while self._running:
            self._take_ended()
            if time.monotonic() > give_up_at:
                for one in self._running:
                    one.process.kill()
            time.sleep(POLL_S)


def is_held(paths: RunPaths) -> bool:
    """Is a run of this trial alive? This creates nothing, and releases the lock at once."""
    try:
        fd = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def visible_gpus(slot: Sequence[int]) -> list[str]:
    """The names by which CUDA knows a slot's GPUs, within what CUDA_VISIBLE_DEVICES leaves."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else []
    return [names[gpu].strip() if gpu < len(names) else str(gpu) for gpu in slot]
