"""Runs a module, as a program or forked by a host: `python -m tests.programs.forked_program MODULE …`.

With `--orders …` it is the host, as the launcher starts one. In its environment, DIES_AT names a moment of a start at
which who is there kills itself, THREAD gives the host a second
thread, and its imports last until there is a file IMPORTS.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from actors.processes import process_host

NAME = "tests.programs.forked_program"


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def preload() -> None:
    match os.environ.get("DIES_AT"):
        case "import":
            die()
        case "order":
            process_host.Host._start = die
        case "fork":
            process_host.Host._fork = die
        case "server":
            process_host.die_with = die
    if "THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if "IMPORTS" in os.environ:
        print("imports", flush=True)
        while not Path(os.environ["IMPORTS"]).exists():
            time.sleep(0.01)


def main() -> None:
    words = sys.argv
    if process_host.ORDERS in words:
        words = process_host.serve(words, preload)
        words = words[words.index(NAME) :]
    _, module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
