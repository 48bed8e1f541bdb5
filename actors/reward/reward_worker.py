"""The process in which a reward function runs. Started as a script by `actors/reward/reward_process.py`, never
imported.

A separate process, since only a process can be killed when a completion takes too long: math may hang in C, where
neither a thread nor a signal helps. Up to the first message it needs the standard library alone, so that nothing of
the parent's main module (Ray, torch) is imported here.

    parent ─► pickled Hello                 once
    parent ─► pickled list of Item          a group's completions
    worker ─► {"ready": true}               once, or {"refused": [message, hint]}
    worker ─► {"value": 1.0} or {"error": "…"}   one line for each item, as soon as it is scored
"""

from __future__ import annotations

import ctypes
import json
import math
import numbers
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_ERROR_CHARS = 500


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end."""
    die_with_parent(parent)
    os.set_inheritable(fd, False)  # what the function starts must not hold the line open when this process is gone
    line = socket.socket(fileno=fd)
    requests = line.makefile("rb")
    hello = pickle.load(requests)
    sys.path[:] = hello["sys_path"]
    reward = load(hello["fn"], line)
    while True:
        try:
            items = pickle.load(requests)
        except EOFError:
            return
        for item in items:
            say(line, score(reward, item))


def die_with_parent(parent: int) -> None:
    """The signal comes when the thread that started this process ends, and then nobody waits for an answer."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the line above
        os._exit(0)


def load(path: str, line: socket.socket) -> Callable[..., object]:
    from actors.reward.reward_import import load_reward_fn
    from launcher.base.errors import RewardImportError

    try:
        reward = load_reward_fn(path)
    except RewardImportError as error:
        say(line, {"refused": [error.message, error.hint]})
        sys.exit(0)
    say(line, {"ready": True})
    return reward


def score(reward: Callable[..., object], item: Mapping[str, Any]) -> dict[str, object]:
    """The function's answer, or why there is none. Never 0 for a failure (P1)."""
    try:
        value = reward(**{**item, "record": dict(item["record"])})  # its own, whatever the function does to it
        if not isinstance(value, numbers.Real):
            return {"error": f"answered {value!r:.100}, a {type(value).__name__} and not a number"}
        number = float(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a function raises is that completion's alone
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
    return {"value": number} if math.isfinite(number) else {"error": f"answered {number}, which is not finite"}


def say(line: socket.socket, message: Mapping[str, object]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
