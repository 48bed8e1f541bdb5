"""Detects an actor that no longer answers although Ray counts it as alive, and one that crashes after each restart.

Counted are turns of the asking process without an answer, not seconds: a pause of that process accuses nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

EVERY_TURNS = 8
"""Turns between two calls: each costs both sides 2 ms of processor time."""
SHORT_LIFE_S = 10.0
PATIENCE_S = 300.0


class CrashLoop:
    """Detects incarnations that each end soon after their start: Ray would restart such an actor for ever."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._since: float | None = None

    def begins(self) -> None:
        self._began = self._clock()

    def ended(self) -> bool:
        """An incarnation ended; True where none has lasted for PATIENCE_S."""
        now = self._clock()
        if now - self._began > SHORT_LIFE_S:
            self._since = None
        elif self._since is None:
            self._since = self._began
        return self._since is not None and now - self._since > PATIENCE_S


class Heartbeat:
    """`ask` sends one question and returns its reference; `has_stopped` is called once a turn. `answer`: the last."""

    def __init__(self, ask: Any, *, most_turns: int) -> None:
        self._ask = ask
        self._most_turns = most_turns
        self._waiting: Any = None
        self._turns = 0
        self._rests = 0
        self.answer: Any = None

    def has_stopped(self) -> bool:
        """True once when an answer is overdue; the count then starts again."""
        if self._rests > 0:
            self._rests -= 1
            return False
        if self._waiting is None:
            self._waiting = self._ask()
            self._turns = 0
        if ray.wait([self._waiting], timeout=0)[0]:
            answered = self._waiting
            self._waiting = None
            self._rests = EVERY_TURNS
            with contextlib.suppress(RayError):  # it is being restarted: Ray knows
                self.answer = ray.get(answered)
            return False
        self._turns += 1
        if self._turns < self._most_turns:
            return False
        self._waiting = None
        return True
