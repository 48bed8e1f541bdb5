"""Injects a list of faults into one live run, each when it is due, and records what was done and when."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launcher.base.durable import make_folder
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.faults.declaration import FaultContext
from scripts.faults.disk_faults import complete_checkpoints
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.run_progress import LiveProgress
from scripts.faults.schedule import (
    COPIES_COUNT,
    Copies,
    FaultChoice,
    FaultMoment,
    ScheduledFault,
    decide,
    in_order,
    is_due,
    last_copy,
)
from scripts.faults.signals import Missed
from scripts.run_processes import NotLive, RunProcesses, find_holder, find_run, is_live

LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The operator's options for a campaign."""

    seed: int
    within_s: float
    keep_one: bool = False
    even_the_last: bool = False


class Campaign:
    """Runs the faults one after the other; `say` gets a line for each thing that happens."""

    def __init__(self, paths: RunPaths, rules: Rules, say: Callable[[str], None]) -> None:
        self._paths = paths
        self._rules = rules
        self._say = say
        self._draw = random.Random(rules.seed)
        self._progress = LiveProgress(paths)
        self._record = FaultPaths(paths).record
        self._last_fault_at = 0.0
        self._began = time.monotonic()

    def run(self, faults: Sequence[ScheduledFault]) -> Counter[FaultChoice]:
        """Each fault's end counted: fired, refused or missed."""
        make_folder(self._record.parent)
        self._began = time.monotonic()
        ends: Counter[FaultChoice] = Counter()
        for number, fault in enumerate(in_order(faults)):
            ends[self._bring_about(number, fault)] += 1
        return ends

    def _bring_about(self, number: int, fault: ScheduledFault) -> FaultChoice:
        choice, reason, context = self._wait(fault)
        if context is None:
            self._write(number, fault, choice.value + "d" if choice is FaultChoice.REFUSE else "missed", reason=reason)
            return choice
        began = {"began_at": time.time(), "began_monotonic": time.monotonic()}
        self._write(number, fault, "begun", reason=reason, **began)
        try:
            assert fault.kind.inject is not None  # parse_fault refuses what is out of reach
            figures = fault.kind.inject(context)
        except Missed as missed:
            self._write(number, fault, "missed", reason=str(missed), **began)
            return FaultChoice.MISS
        finally:
            self._last_fault_at = time.time()
        self._write(number, fault, "fired", reason=reason, **began, **figures)
        return FaultChoice.FIRE

    def _wait(self, fault: ScheduledFault) -> tuple[FaultChoice, str, FaultContext | None]:
        """Until it is to be brought about, or never. The context is there if and only if it is."""
        due_since: float | None = None
        told = ""
        while True:
            moment, found = self._look_for_target(fault)
            if due_since is None and is_due(fault, moment):
                due_since = time.monotonic()
            due_for_s = 0.0 if due_since is None else time.monotonic() - due_since
            choice, reason = decide(fault, moment, due_for_s=due_for_s, within_s=self._rules.within_s)
            if choice is FaultChoice.FIRE and found is not None:
                return choice, reason, self._context(fault, found)
            if choice is not FaultChoice.WAIT:
                return choice, reason, None
            if is_due(fault, moment) and reason != told:
                told = reason
                self._say(f"{fault}: waits, {reason}")
            time.sleep(LOOK_S)

    def _look_for_target(self, fault: ScheduledFault) -> tuple[FaultMoment, RunProcesses | None]:
        self._progress.refresh()
        elapsed_s, step = time.monotonic() - self._began, self._progress.step
        not_yet = FaultMoment(elapsed_s=elapsed_s, step=step)
        try:
            if not is_due(fault, not_yet):  # a look at all processes costs the run a tenth of a core
                find_holder(self._paths)
                return not_yet, None
            found = find_run(self._paths)
        except NotLive:
            if is_live(self._paths):  # its keeper begins another driver
                return not_yet, None
            return FaultMoment(elapsed_s=elapsed_s, step=step, run_is_live=False), None
        recovering = self._progress.recovering(fault.kind.role, found, since=self._last_fault_at)
        if recovering:
            return replace(not_yet, recovering=recovering), found
        return replace(not_yet, last_copy=self.last_copy(fault, found)), found  # which costs the checkpoints' hashes

    def last_copy(self, fault: ScheduledFault, found: RunProcesses) -> str:
        """Why it would end a last good copy; empty with --even-the-last."""
        kind = fault.kind.id
        if self._rules.even_the_last or kind not in COPIES_COUNT:
            return ""
        needed = 2 if kind == "T4" else 0 if kind in {"C1", "C2", "C3", "C7", "C9"} else 1
        copies = Copies(
            complete_checkpoints=len(complete_checkpoints(self._paths, enough=needed)) if needed else 0,
            live_servers=len(self._progress.ready_servers(found)),
        )
        return last_copy(kind, copies, keep_one=self._rules.keep_one)

    def _context(self, fault: ScheduledFault, found: RunProcesses) -> FaultContext:
        return FaultContext(
            paths=self._paths,
            found=found,
            options=fault.options,
            ready=self._progress.ready_servers(found),
            draw=self._draw,
            within_s=self._rules.within_s,
        )

    def _write(self, number: int, fault: ScheduledFault, what: str, *, reason: str, **figures: object) -> None:
        head = {
            "time": time.time(),
            "monotonic": time.monotonic(),
            "fault": number,
            "kind": fault.kind.id,
            "what": what,
            "asked": str(fault),
            "seed": self._rules.seed,
            "step": self._progress.step,
            "reason": reason,
        }
        append_line(self._record, head | figures, durable=True)
        shown = " ".join(f"{key}={value}" for key, value in figures.items() if not key.startswith("began"))
        self._say(f"{fault}: {what} after step {self._progress.step} {shown or reason}")
