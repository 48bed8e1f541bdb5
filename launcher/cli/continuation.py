"""Begins the same command again, in place of this process: Ray can't be relied on in a process that has lost a cluster.

    an attempt is lost, or halts ─► all of it is ended ─► execve, with what the next one must know in the environment

The process keeps its pid, its terminal and its parent. SIGINT and SIGTERM that come meanwhile wait until somebody
listens again (launcher/cli/interrupts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, final

from actors.cluster.cluster_restarts import AttemptLost, Continuation, end_incidents, last_committed
from launcher.base.errors import JournalError, LauncherError, RunError
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.cli.deadlines import Deadlines
from launcher.cli.interrupts import Interrupts
from launcher.cli.keep_alive import predecessor
from launcher.cli.unattended import CONTINUES
from launcher.run_files.journal import Journal
from launcher.run_files.run_ends import last_start_or_end
from launcher.run_files.run_paths import RunPaths

POLL_S = 0.25


@final
class Successor:
    """Takes this process's place. `known`: what the one before it has left, None in the first; `killed`: the driver
    that was killed before this one was begun (launcher/cli/keep_alive.py)."""

    def __init__(self) -> None:
        text = os.environ.pop(CONTINUES, "")  # nobody below this process is to have it
        data = json.loads(text) if text else None
        self.killed = predecessor()
        listed = {"begun", "halted"} & (data or {}).keys()
        self.known = None if data is None else Continuation(**data | {key: tuple(data[key]) for key in listed})

    def begin(self, known: Continuation, interrupts: Interrupts, *, screen_began: float, lock: int) -> NoReturn:
        """Nothing of this process is left but its pid, its standard streams, and the signals that wait."""
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(ChildProcessError):  # a dead raylet would be taken for that of the next cluster
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):  # the one by which they were listed
                if descriptor > 2:
                    os.set_inheritable(descriptor, descriptor == lock)
        command = [sys.executable, *sys.orig_argv[1:]]
        facts = dataclasses.asdict(known) | {"screen_began": screen_began, "lock": lock}
        # Last: another thread may have taken a signal that is held back in this one.
        facts |= {"is_asked": interrupts.asked, "notified_at": interrupts.notified_at}
        os.execve(command[0], command, os.environ | {CONTINUES: json.dumps(facts)})


def wait_for_the_next(
    lost: AttemptLost, interrupts: Interrupts, deadlines: Deadlines, *, meanwhile: Callable[[], None]
) -> None:
    """Until the next attempt may be begun; signals then wait for the process that begins it. Raises KeyboardInterrupt
    where one came before, or a deadline."""
    while time.monotonic() < lost.not_before and not interrupts.asked:
        if deadlines.is_due():
            raise KeyboardInterrupt(deadlines.reason) from lost
        time.sleep(POLL_S)
        meanwhile()
    interrupts.hold_back()
    if interrupts.asked:
        interrupts.listen_again()
        raise KeyboardInterrupt("ended by the user, before another attempt was begun") from lost


@contextlib.contextmanager
def ends_the_run(paths: RunPaths, known: Continuation | None) -> Iterator[None]:
    """An attempt in place of another one can't begin: its run did, and ends with a status (P9)."""
    try:
        yield
    except KeyboardInterrupt:
        asked = "ended by the user, before another attempt was begun"
        _record_end(paths, known, TerminalStatus.ABORTED, asked, why_open=asked)
        raise
    except LauncherError as error:
        why_open = f"no further attempt can begin: {error.message}"
        _record_end(paths, known, TerminalStatus.ERRORED, str(error), why_open=why_open)
        what = f"{TerminalStatus.ERRORED}, as no further attempt can begin: {error.message}"
        raise RunError(what, f"{error.hint}; then the same command resumes") from error


def _record_end(
    paths: RunPaths, known: Continuation | None, status: TerminalStatus, reason: str, *, why_open: str
) -> None:
    attempt = last_start_or_end(paths).get("attempt") if known is None else known.attempt
    journal = Journal(paths.events, attempt if isinstance(attempt, int) else 0, time.time)
    with contextlib.suppress(JournalError):  # the disk may be why
        end_incidents(journal, paths, known, why_open)
    code, step = EXIT_CODES[status], last_committed(paths)
    journal.record(f"run.{status.lower()}", reason=reason, global_step=step, exit_code=code)
    # Only now: NumPy's threads would take signals that this one holds back for the next process.
    from launcher.html_report.report_writer import write_report

    with contextlib.suppress(JournalError):
        write_report(paths, is_live=False)
