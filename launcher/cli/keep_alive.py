"""Begins a driver again that was killed (`keep_alive=true`): its small parent, without Ray, torch or Hydra.

    python -m launcher … keep_alive=true
        │ composed and checked; bad settings end here
        └─► execve: this module   starts the same command in a process group of its own, and waits
                ├─ the driver ended with an exit code  ─► so does this process
                ├─ after a signal that was passed on   ─► ended
                └─ it was killed (SIGKILL, a crash)    ─► budget left? ─► wait, start it again

It keeps pid and terminal of the command. SIGINT, SIGTERM and SIGUSR1 are passed on, each once. If this process is
killed itself, the kernel sends the driver SIGINT: it saves and ends. What happened is handed to the next driver in its
environment, and recorded by it (actors/cluster/cluster_restarts.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.exit_codes import EXIT_CODES, RESUMES
from launcher.base.messages import Cause, KilledDriver, TerminalStatus
from launcher.base.parent_death import end_with
from launcher.cli.interrupts import NOTICE, SIGNALS
from launcher.config.supervision import RestartConfig
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair

if TYPE_CHECKING:
    from launcher.config.schema import RunConfig

DRIVER = "driver"
KEPT = "GRPO_KEPT"
"""In the environment of all that a kept driver starts: the pid of its parent, a name, and how often it was begun."""
KILLED = "GRPO_KILLED"
"""In the environment of a driver that takes the place of one that was killed: what is known of that."""
ENDS_WHO_GETS_IT = (*SIGNALS, signal.SIGHUP)
"""A driver that does not listen yet is ended by them: it was asked to, not killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTask:
    """What the parent must know of the run. `least_wait_s`: before a new driver, whatever the budget says."""

    logs: str
    restart: RestartConfig
    least_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAgain:
    not_before: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWith:
    """`reason`: "" where the driver has recorded its end itself."""

    code: int
    reason: str = ""


def after_end(
    returned: int,
    killed_at: Sequence[float],
    task: KeepTask,
    *,
    now: float,
    progress_at: float | None,
    asked: signal.Signals | None,
) -> BeginAgain | EndWith:
    """What follows a driver's end. `returned`: its exit code, or minus the number of the signal that ended it.
    `killed_at`: when earlier ones were killed; `progress_at`: when a step was first seen that none before had reached;
    `asked`: the signal that was passed on."""
    if returned >= 0:
        return EndWith(code=returned)
    how = signal.Signals(-returned).name
    if asked is not None or -returned in ENDS_WHO_GETS_IT:
        return _end_for(asked or signal.Signals(-returned), f"the driver was ended by {how}")
    attempts = [RepairAttempt(at=at, cause=Cause.DRIVER_LOST, subject=DRIVER, rung=Rung.DRIVER) for at in killed_at]
    repair = next_repair(Cause.DRIVER_LOST, DRIVER, attempts, task.restart, now=now, progress_at=progress_at)
    if repair.rung is Rung.HALT:
        again = f"; {len(attempts)} before it brought no further step (restart.driver)" if attempts else ""
        return EndWith(code=EXIT_CODES[TerminalStatus.ERRORED], reason=f"the driver was ended by {how}{again}")
    not_before = max(repair.not_before, now + task.least_wait_s)
    return BeginAgain(not_before=not_before, reason=f"the driver was ended by {how}")


def _end_for(asked: signal.Signals, reason: str) -> EndWith:
    if asked is NOTICE:
        return EndWith(code=RESUMES, reason=f"the machine is taken away (SIGUSR1); {reason}")
    return EndWith(code=EXIT_CODES[TerminalStatus.ABORTED], reason=f"ended by the user; {reason}")


def is_kept() -> bool:
    """Whether this process is the driver that its parent keeps alive."""
    return os.environ.get(KEPT, "").startswith(f"{os.getppid()}:")


def begin(config: RunConfig) -> None:
    """Become the parent of the same command, where that is wanted and not done; returns where it isn't.

    On a cluster that the run has joined, a killed driver's actors get the time of a lease to end.
    """
    if not config.keep_alive or is_kept():
        return
    from launcher.run_files.run_paths import RunPaths

    wait_s = 0.0 if config.cluster.address == "local" else config.cluster.lease_s
    task = KeepTask(logs=str(RunPaths.of(config).logs), restart=config.restart, least_wait_s=wait_s)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(task)), sys.executable]
    os.execv(sys.executable, [*command, *sys.orig_argv[1:]])


def predecessor() -> KilledDriver | None:
    """What this process takes the place of; asked once, as nobody below it is to have it."""
    text = os.environ.pop(KILLED, "")
    return KilledDriver(**json.loads(text)) if text else None


class Keeper:
    """Starts `command`, and starts it again. `say` gets a line for each driver that was killed."""

    def __init__(self, command: Sequence[str], task: KeepTask, say: Callable[[str], None]) -> None:
        self._command = command
        self._task = task
        self._say = say
        self._name = f"{os.getpid()}:{uuid.uuid4().hex}"
        self._killed_at: list[float] = []
        self._furthest = -1
        self._progress_at: float | None = None
        self._asked: signal.Signals | None = None
        self._began = time.monotonic()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})

    def run(self) -> int:
        """Until no driver follows; the exit code."""
        killed: KilledDriver | None = None
        while True:
            returned = self._drive(killed)
            now = time.monotonic()
            if (step := self._last_step()) > self._furthest:
                self._furthest, self._progress_at = step, now
            next_ = after_end(
                returned, self._killed_at, self._task, now=now, progress_at=self._progress_at, asked=self._asked
            )
            if isinstance(next_, BeginAgain):
                self._say(f"{next_.reason}; it is begun again in {max(next_.not_before - now, 0):.0f} s")
                self._wait(until=next_.not_before)
                if self._asked is not None:
                    next_ = _end_for(self._asked, next_.reason)
            if isinstance(next_, EndWith):
                if next_.reason:
                    self._record_end(next_)
                return next_.code
            mark = f"{KEPT}={self._mark}"
            self._killed_at.append(now)
            how = signal.Signals(-returned).name
            times, settings = len(self._killed_at), self._settings()
            killed = KilledDriver(how=how, at=now, began=self._began, times=times, mark=mark, settings=settings)

    @property
    def _mark(self) -> str:
        return f"{self._name}:{len(self._killed_at)}"

    def _drive(self, killed: KilledDriver | None) -> int:
        environment = os.environ | {KEPT: self._mark}
        if killed is not None:
            environment[KILLED] = json.dumps(dataclasses.asdict(killed))
        tie = end_with(os.getpid(), signal.SIGINT, code=EXIT_CODES[TerminalStatus.ABORTED])

        def prepare() -> None:  # safe, as this process has one thread
            tie()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

        # A group of its own: a terminal's Ctrl-C would reach the driver twice, and the second ends it at once.
        driver = subprocess.Popen(self._command, env=environment, process_group=0, preexec_fn=prepare)
        while (returned := driver.poll()) is None:
            self._hear(signal.sigwait({*SIGNALS, signal.SIGCHLD}), pass_on=driver)
        return returned

    def _wait(self, *, until: float) -> None:
        while self._asked is None and (left := until - time.monotonic()) > 0:
            if came := signal.sigtimedwait(SIGNALS, left):
                self._hear(came.si_signo)

    def _hear(self, number: int, *, pass_on: subprocess.Popen[bytes] | None = None) -> None:
        """Asked to end, and to end before the machine does, is asked to end."""
        if number not in SIGNALS:
            return
        if self._asked in (None, NOTICE):
            self._asked = signal.Signals(number)
        if pass_on is not None:
            pass_on.send_signal(number)

    def _last_step(self) -> int:
        """The ledger's last; -1 where there is none."""
        from launcher.run_files.journal import read_lines  # only now: most runs never need it

        steps = (line.get("global_step") for line in read_lines(Path(self._task.logs, "ledger.jsonl")))
        return max((step for step in steps if isinstance(step, int)), default=-1)

    def _settings(self) -> str:
        """The file of those that the first of its drivers began the run with; "" where none has begun it."""
        from launcher.run_files.journal import number_of, read_lines
        from launcher.run_files.run_ends import STARTED

        for event in read_lines(Path(self._task.logs, "events.jsonl")):
            is_ours = number_of(event.get("monotonic"), 0.0) >= self._began  # earlier commands have begun it too
            if event.get("event") == STARTED and is_ours and event.get("settings"):
                return str(Path(self._task.logs, str(event["settings"])))
        return ""

    def _record_end(self, end: EndWith) -> None:
        """For a driver that could not (P9)."""
        from launcher.run_files.journal import Journal
        from launcher.run_files.run_ends import last_start_or_end
        from launcher.run_files.run_paths import RunPaths

        known = {code: status for status, code in EXIT_CODES.items()} | {RESUMES: TerminalStatus.ABORTED}
        status = known[end.code]
        self._say(f"{status}: {end.reason}\n  → the same command resumes")
        paths = RunPaths.of_logs(Path(self._task.logs))
        if paths is not None and paths.events.exists():
            attempt = last_start_or_end(paths).get("attempt")
            journal = Journal(paths.events, attempt if isinstance(attempt, int) else 0, time.time)
            journal.record(f"run.{status.lower()}", reason=end.reason, exit_code=end.code)


def main() -> int:
    task = json.loads(sys.argv[1])
    task["restart"] = RestartConfig(**task["restart"])
    return Keeper(sys.argv[2:], KeepTask(**task), lambda line: print(f"keep_alive: {line}", file=sys.stderr)).run()


if __name__ == "__main__":
    sys.exit(main())
