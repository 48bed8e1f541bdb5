"""Runs a module, as a program or forked of a template: `python -m tests.programs.forked_program MODULE …`.

With `--orders FD` it is the template, which is how the launcher starts one. In its environment, DIES_AT names a
moment of a start at which who is there kills itself, and THREAD gives the template a second thread.
"""

import os
import runpy
import signal
import sys
import threading

from actors.processes import forked_start

NAME = "tests.programs.forked_program"


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: str) -> None:
    become_guard = forked_start._become_guard
    match moment:
        case "launcher":
            forked_start._start = die
        case "before guards":
            forked_start.begin_as_sentinel = die
        case "sentinel" | "guard":
            option = {"sentinel": "--guard", "guard": "--server"}[moment]
            forked_start._become_guard = lambda words, *rest: (die if option in words else become_guard)(words, *rest)
        case "server":
            forked_start._print_to = die
        case "let go":
            forked_start._be_a_new_program = die


def main() -> None:
    words = sys.argv
    if forked_start.ORDERS in words:
        die_at(os.environ.get("DIES_AT", ""))
        if "THREAD" in os.environ:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        words = forked_start.serve_orders(int(words[words.index(forked_start.ORDERS) + 1]))
        words = words[words.index(NAME) :]
    _, module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
