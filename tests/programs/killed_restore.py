"""Asks for a restore, takes it, or takes it back, in forks that are killed before a system call of a given number:
`python -m tests.programs.killed_restore` reads `WHAT CALL ROOT`, one order a line. CALL -1: not at all; the answer then
counts its calls. As tests/programs/killed_saver.py, which traces them.
"""

import os
import signal
import sys
import time
import traceback

from launcher.checkpoints.restore_request import ask_restore, take_restore, withdraw_restore
from launcher.run_files.journal import Journal
from tests.programs.killed_saver import TRACE_ME, ptrace, traced
from tests.support.worlds.checkpoints import Run


def do(what: str, run: Run) -> None:
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
        run = Run(root)
        child = os.fork()
        if child == 0:
            ptrace(TRACE_ME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                do(what, run)
            except Exception:  # noqa: BLE001 - shown by the test's output, and by what it finds then
                traceback.print_exc()
            os._exit(0)
        print(dict(traced(child, int(call))), flush=True)


if __name__ == "__main__":
    main()
