"""Runs a module, as a program or forked by a host: `python -m tests.programs.forked_program MODULE …`.

With `--orders …` it is the host, as the launcher starts one, and with `--plain --orders …` one that forks nothing. In
its environment, DIES_AT names a moment of a start at which who is there kills itself, THREAD gives the host a second
thread, its imports last until there is a file IMPORTS, and it looks at its tree each LOOK_S seconds.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from actors.processes import process_host

NAME, PLAIN = "tests.programs.forked_program", "--plain"
LOOKS = ".looks"
"""Suffix of a file beside the host's log, which has a byte for each look that is over."""


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class CountedHost(process_host.Host):
    def _look_at_server(self, server):
        super()._look_at_server(server)
        with self._log.with_suffix(LOOKS).open("a") as looks:
            looks.write(".")


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
        process_host.LOOK_S = float(os.environ.get("LOOK_S", process_host.LOOK_S))
        process_host.Host = CountedHost
        words = process_host.serve(words, None if PLAIN in words else preload)
        words = words[words.index(NAME) :]
    _, module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
