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
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, final

from actors.cluster.cluster_restarts import AttemptLost, Continuation
from launcher.cli.deadlines import Deadlines
from launcher.cli.interrupts import Interrupts
from launcher.cli.keep_alive import predecessor
from launcher.cli.unattended import CONTINUES

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
