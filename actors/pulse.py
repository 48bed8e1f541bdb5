"""Does an actor that Ray holds for alive still answer? One that is stopped, or whose loop stands, does not.

Counted are turns of the asker without an answer, not seconds: a pause of its own then condemns nobody.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

MOST_TURNS = 120
"""Of the driver's quarter seconds: a restart of the actor by Ray takes a tenth of that."""


class Pulse:
    """`ask` sends one question and returns its reference; `beat` is called once a turn."""

    def __init__(self, ask: Any, *, most_turns: int = MOST_TURNS) -> None:
        self._ask = ask
        self._most_turns = most_turns
        self._waiting: Any = None
        self._turns = 0

    def has_stopped(self) -> bool:
        """True once where it owes an answer for too long; the count then begins anew."""
        if self._waiting is None:
            self._waiting, self._turns = self._ask(), 0
        if ray.wait([self._waiting], timeout=0)[0]:
            answered, self._waiting = self._waiting, None
            try:
                ray.get(answered)
            except RayError:  # it is being restarted: Ray knows
                return False
            return False
        self._turns += 1
        if self._turns < self._most_turns:
            return False
        self._waiting = None
        return True
