"""A server's process tree, for the tests of its host: `python -S -m tests.programs.fake_tree FILE [NAME]`.

It has a child, a grandchild, and two daemons: one that has left session and parent and ignores SIGTERM, and one that
did the same with an empty environment. The grandchild, whose name is NAME, holds FILE open. It prints `up` when all
are there, and sleeps.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_NAME = 15


def sleep_for_ever() -> None:
    while True:
        time.sleep(1000)


def fork(work) -> None:
    if os.fork() == 0:
        work()
        os._exit(0)


def grandchild() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, sys.argv[2].encode() if len(sys.argv) > 2 else b"grandchild", 0, 0, 0)
    with open(sys.argv[1], "w") as file:  # noqa: PTH123 - held open
        file.write("here")
        file.flush()
        sleep_for_ever()


def child() -> None:
    fork(grandchild)
    sleep_for_ever()


def daemon() -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fork(sleep_for_ever)  # and ends, so that nobody is its parent


def bare_daemon() -> None:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], {})


def main() -> None:
    for work in (child, daemon, bare_daemon):
        fork(work)
    print("up", flush=True)
    sleep_for_ever()


if __name__ == "__main__":
    main()
