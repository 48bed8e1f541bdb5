"""The keeper: the small parent of every run's driver, which begins another one where that may help.

    python -m launcher …   composes, checks, takes the run's lock, writes the settings down
        │ execve: the same pid, without Ray, torch or Hydra
        └─► keeper ─► driver, in a process group of its own ─► how did it end? (launcher/policy/next_attempt.py)
              ▲                                                 ├─ another may follow ─► begun at once
              └─────────────────────────────────────────────────┤
                                                                └─ none may ─► the run's end, exit code

It keeps pid, terminal and lock of the command, and the budgets in its memory. Signals are passed on to the driver. If
this process is killed itself, the kernel sends the driver SIGINT: it saves and ends. Whatever the driver leaves behind
becomes a child of this process, which the next driver ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.base.exit_codes import AGAIN, EXIT_CODES
from launcher.base.messages import Cause, TerminalStatus
from launcher.base.parent_death import adopt_orphans, end_with
from launcher.base.wording import signal_name
from launcher.cli.interrupts import HEARD, is_switched_off
from launcher.config.supervision import RestartConfig
from launcher.policy.next_attempt import NOTICE, Again, BeginAgain, EndRun, KeptRun, after_end, begun
from launcher.policy.restart_budget import RepairAttempt

if TYPE_CHECKING:
    from launcher.config.schema import RunConfig

DRIVER = ("-m", "launcher.driver_process")
"""Python's arguments for a driver, before its task."""
TASK = '{"logs": '
"""How the last argument of each driver begins, by which its process is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverTask:
    """What a driver is given as its last argument. Times are monotonic, which the host's processes share.

    `words`: of the command that was typed, less secrets; `path`: its sys.path; `began`: when it did; `first_attempt`:
    the number of its first attempt; `lock`: the descriptor of the run's lock; `before`: how the driver before ended.
    """

    logs: str
    words: Sequence[str]
    path: Sequence[str]
    began: float
    first_attempt: int
    lock: int
    before: BeginAgain | None = None

    @classmethod
    def read(cls, text: str) -> DriverTask:
        data = json.loads(text)
        if (before := data["before"]) is not None:
            data["before"] = BeginAgain(**before | {"cause": Cause(before["cause"])})
        return cls(**data)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperTask:
    """`python`: the interpreter and its options; `driver`: as `DRIVER`."""

    python: Sequence[str]
    driver: Sequence[str]
    run: KeptRun
    task: DriverTask = field(kw_only=True)

    @classmethod
    def read(cls, text: str) -> KeeperTask:
        data: dict[str, Any] = json.loads(text)
        data["run"]["restart"] = RestartConfig(**data["run"]["restart"])
        return cls(**data | {"run": KeptRun(**data["run"]), "task": DriverTask(**data["task"])})


def begin(config: RunConfig) -> NoReturn:
    """Take the run's lock, write its settings down, and become its keeper. Raises UsageErrors, StorageError.

    On a cluster that the run has joined, a killed driver's actors get the time of a lease to end.
    """
    from launcher.cli.unattended import hide_webhook
    from launcher.run_files.run_paths import RunLock, RunPaths, last_attempt
    from launcher.run_files.written_settings import write_settings

    paths = RunPaths.of(config)
    paths.prepare()
    lock = RunLock(paths)
    hide_webhook(config, paths)
    write_settings(config, paths.settings)
    # Installed, the command finds the user's modules behind all others; `-m` alone would put them first.
    python = [sys.executable] if "-m" in sys.orig_argv else [sys.executable, "-P"]
    task = DriverTask(
        logs=str(paths.logs),
        words=sys.argv[1:],
        path=sys.path,
        began=time.monotonic() - _age_s(),
        first_attempt=last_attempt(paths) + 1,
        lock=lock.keep_over_exec(),
    )
    wait_s = 0.0 if config.cluster.address == "local" else config.cluster.lease_s
    run = KeptRun(restart=config.restart, resumes=config.recover.mode != "off", least_wait_s=wait_s)
    kept = KeeperTask(python=python, driver=DRIVER, run=run, task=task)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # else one that comes meanwhile ends the keeper before it listens
    os.execv(sys.executable, [*python, "-m", __name__, json.dumps(dataclasses.asdict(kept))])


def _age_s() -> float:
    """Of this process."""
    import psutil

    return time.time() - psutil.Process().create_time()


class Keeper:
    """Starts a driver, and another one in its place. `say` gets a line for each that was killed."""

    def __init__(self, kept: KeeperTask, say: Callable[[str], None]) -> None:
        self._kept = kept
        self._say = say
        self._logs = Path(kept.task.logs)
        self._history: list[RepairAttempt] = []
        self._next_step = 0
        self._progress_at: float | None = None
        self._asked: signal.Signals | None = None
        self._heard = {number for number in HEARD if not is_switched_off(number)}
        signal.pthread_sigmask(signal.SIG_BLOCK, {*HEARD, signal.SIGCHLD})
        adopt_orphans()

    def run(self) -> int:
        """Until no driver follows; the exit code."""
        before: BeginAgain | None = None
        while True:
            returned, again = self._drive(before), None
            if returned == AGAIN:
                again = read_again(self._logs / "again.json")
            now = time.monotonic()
            if (reached := self._reached()) > self._next_step:
                self._next_step = reached
                self._progress_at = now
            next_ = after_end(
                returned,
                again,
                self._history,
                self._kept.run,
                now=now,
                progress_at=self._progress_at,
                asked=self._asked,
            )
            if isinstance(next_, EndRun):
                return self._end(next_) if next_.reason else next_.code
            if next_.cause is Cause.DRIVER_LOST:
                how = signal_name(-returned)
                self._say(f"the driver was ended by {how}; it is begun again in {max(next_.not_before - now, 0):.0f} s")
            self._history.append(begun(next_, now))
            before = next_

    def _drive(self, before: BeginAgain | None) -> int:
        """Run a driver to its end: its exit code, or minus the number of the signal that ended it."""
        (self._logs / "again.json").unlink(missing_ok=True)  # an earlier driver's would be taken for this one's
        task = dataclasses.replace(self._kept.task, before=before)
        tie = end_with(os.getpid(), signal.SIGINT, code=EXIT_CODES[TerminalStatus.ABORTED])

        def prepare() -> None:  # safe, as this process has one thread
            tie()
            signal.pthread_sigmask(signal.SIG_SETMASK, HEARD)  # until it listens (launcher/driver_process.py)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # with `stty tostop` its first line would stop it

        # A group of its own: a terminal's Ctrl-C would reach the driver twice, and the second ends it at once.
        driver = subprocess.Popen(
            [*self._kept.python, *self._kept.driver, task.text()],
            process_group=0,
            pass_fds=(task.lock,),  # of a killed keeper the driver saves, while nobody else may begin the run
            preexec_fn=prepare,  # noqa: PLW1509
        )
        while (returned := _reap(driver)) is None:
            self._hear(signal.sigwait({*self._heard, signal.SIGCHLD}), pass_on=driver)
        while came := signal.sigtimedwait(self._heard, 0):
            self._hear(came.si_signo)
        return returned

    def _hear(self, number: int, *, pass_on: subprocess.Popen[bytes] | None = None) -> None:
        """Asked to end, and to end before the machine does, is asked to end."""
        if number == signal.SIGCHLD:
            return
        if self._asked in (None, NOTICE):
            self._asked = signal.Signals(number)
        if pass_on is not None:
            pass_on.send_signal(number)

    def _reached(self) -> int:
        """The step after the furthest that the run was seen to commit: the ledger's last, or, of another project's
        trainer, what was last written of it."""
        committed = [line.get("global_step", -1) + 1 for line in _records(self._logs / "ledger.jsonl")]
        shown = [(now.get("status") or {}).get("next_step", 0) for now in _records(self._logs / "now.json")]
        reached: int = max([0, *committed, *shown])
        return reached

    def _end(self, end: EndRun) -> int:
        """Of a run whose driver could not record it (P9), by a process that may import what that takes."""
        facts = json.dumps({"code": end.code, "reason": end.reason})
        command = [*self._kept.python, "-m", "launcher.cli.run_end", facts, self._kept.task.text()]
        with subprocess.Popen(command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ())) as ending:  # noqa: PLW1509
            return ending.wait()


def read_again(file: Path) -> Again | None:
    """None where the driver has not written it."""
    try:
        data = json.loads(file.read_bytes())
        return Again(**data | {"cause": Cause(data["cause"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _records(file: Path) -> list[dict[str, Any]]:
    """As `journal.read_lines`, which would double the size of this process."""
    found = []
    with contextlib.suppress(OSError), file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


def _reap(driver: subprocess.Popen[bytes]) -> int | None:
    """How the driver ended; None while it runs. Orphans that end meanwhile leave no zombies."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == driver.pid:
            return driver.wait()
        os.waitpid(ended.si_pid, 0)
    return None


def main() -> int:
    kept = KeeperTask.read(sys.argv[1])
    return Keeper(kept, lambda line: print(line, file=sys.stderr, flush=True)).run()


if __name__ == "__main__":
    sys.exit(main())
