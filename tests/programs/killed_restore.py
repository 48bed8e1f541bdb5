"""Asks for a restore, takes it, or takes it back, in forks that are killed before a system call of a given number:
`python -m tests.programs.killed_restore` reads `WHAT CALL ROOT`, one order a line. CALL -1: not at all; the answer then
counts its calls. As tests/programs/killed_saver.py, which traces them. Of the whole command only the calls count that
change a file system: it reads a checkpoint, with hundreds of calls.
"""

import ast
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from launcher.checkpoints.restore_request import ask_restore, take_restore, withdraw_restore
from launcher.run_files.journal import Journal
from scripts import setup_recovery
from tests.programs.killed_saver import CALLS, TRACE_ME, ptrace, traced
from tests.support.trial_names import NAMES
from tests.support.worlds.checkpoints import Run

REPOSITORY = Path(__file__).parents[2]
EACH = frozenset(CALLS.values())
CHANGES = EACH - {"open", "close"}


def do(what: str, root: str) -> None:
    if what == "command":
        setup_recovery.main(["--fileroot", root, *NAMES, "--before-step", "25", "--json"])
        return
    run = Run(root)
    match what:
        case "ask":
            ask_restore(run.paths, run.store.find(5), why="a person asked", condemn_after=None)
        case "take":
            take_restore(run.paths, Journal(run.paths.events, 2, time.time))
        case "undo":
            withdraw_restore(run.paths)
        case _:
            raise ValueError(what)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        what, call, root = line.split()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the pipe is the answers'
            ptrace(TRACE_ME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                do(what, root)
            except Exception:  # noqa: BLE001 - shown by the test's output, and by what it finds then
                traceback.print_exc()
            os._exit(0)
        print(dict(traced(child, int(call), CHANGES if what == "command" else EACH)), flush=True)


class Victim:
    """The test's side."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.programs.killed_restore"]
        self._server = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._server.stdout.readline() == "ready\n"

    def does(self, what: str, root: Path, before_call: int = -1) -> dict[str, int]:
        """The calls that were seen; -1: it is not killed."""
        self._server.stdin.write(f"{what} {before_call} {root}\n")
        return ast.literal_eval(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


if __name__ == "__main__":
    main()
