"""The process in which reward functions and episodes run. Started as a script by `actors/reward/user_process.py`,
never imported.

A separate process, since only a process can be killed when a completion takes too long: math may hang in C, where
neither a thread nor a signal helps. Up to the first message it needs the standard library alone, so that nothing of
the parent's main module (Ray, torch) is imported here.

    parent ─► pickled Hello                                  once
    worker ─► {"ready": true, "is_async": …}                 once, or {"refused": [message, hint]}
    parent ─► pickled {"id": n, "items": [Item, …]}          a group's completions
    worker ─► {"id": n, "value": 1.0, "parts": {…}}          one line for each item, or {"id": n, "error": "…", …}
    parent ─► pickled {"id": n, "answers": […]}              which of a data set's answers can't be compared with?
    worker ─► {"id": n, "problems": [[place, "…"], …]}

With `episode` in the Hello it plays episodes (`actors/reward/episode_functions.py`), many at a time:

    parent ─► pickled {"id": n, "record": …, …}, {"id": n, "ping": …} or {"cancel": m}
    worker ─► {"id": n, "value": 1.0, "parts": {…}} or {"id": n, "error": "…"}
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PID = os.getpid()


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end."""
    die_with_parent(parent)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # each line in one write, at once: this process ends by being killed
            stream.reconfigure(line_buffering=True, write_through=False)
    os.set_inheritable(fd, False)  # what the function starts must not hold the line open when this process is gone
    line = socket.socket(fileno=fd)
    requests = line.makefile("rb")
    hello = pickle.load(requests)
    sys.path[:] = hello["sys_path"]
    os.set_inheritable(hello["running"], False)
    if hello["tracebacks"]:
        from actors.reward.raised_errors import write_tracebacks

        write_tracebacks()
    receive = functools.partial(pickle.load, requests)
    (play if hello["episode"] else score)(hello, line, receive)


def die_with_parent(parent: int) -> None:
    """The signal comes when the thread that started this process ends, and then nobody waits for an answer."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the line above
        os._exit(0)


def score(hello: Mapping[str, Any], line: socket.socket, receive: Callable[[], dict[str, Any]]) -> None:
    from actors.reward.reward_functions import RewardFunctions

    rewards = load(line, lambda: RewardFunctions(hello["fn"], hello["weights"], hello["timeout"]))
    say(line, {"ready": True, "is_async": rewards.is_async})
    while True:
        try:
            order = receive()
        except EOFError:
            return
        if "answers" in order:
            say(line, {"id": order["id"], "problems": list(rewards.find_bad_answers(order["answers"]).items())})
            continue
        for message in rewards.score(order["items"]):
            say(line, {"id": order["id"], **message})


def play(hello: Mapping[str, Any], line: socket.socket, receive: Callable[[], dict[str, Any]]) -> None:
    from actors.reward.episode_functions import EpisodeFunction, serve

    function = load(line, lambda: EpisodeFunction(hello["episode"]))
    say(line, {"ready": True, "is_async": True})

    def note(number: int) -> None:
        os.pwrite(hello["running"], number.to_bytes(8, sys.byteorder), 0)

    serve(function, receive, functools.partial(say, line), note)


def load(line: socket.socket, make: Callable[[], T]) -> T:
    from launcher.base.errors import RewardImportError

    try:
        return make()
    except RewardImportError as error:
        say(line, {"refused": [error.message, error.hint]})
        sys.exit(0)


def say(line: socket.socket, message: Mapping[str, object]) -> None:
    """Never from a process that a function forked and that came back from it: who listens would take its answer for
    that to the next completion."""
    if os.getpid() != PID:
        print(f"a process forked by reward.fn or rollout.episode returned from it: {os.getpid()} is ended", flush=True)
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the function may have closed it
            stream.flush()  # what is no whole line yet
    line.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
