"""The time that a run has spent: its attempts one after the other, without the gaps between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """From its `run.started` to the last that is known of it, in unix seconds."""

    number: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class RunClock:
    """Seconds of all attempts, laid end to end; where one ends the next begins."""

    def __init__(self, attempts: Sequence[AttemptSpan]) -> None:
        self._starts = [attempt.start for attempt in attempts]
        self._attempts = attempts
        self._before = [sum(one.seconds for one in attempts[:index]) for index in range(len(attempts))]

    @property
    def total_s(self) -> float:
        return sum(attempt.seconds for attempt in self._attempts)

    @property
    def idle_s(self) -> float:
        """Between the attempts."""
        if not self._attempts:
            return 0.0
        return max(self._attempts[-1].end - self._attempts[0].start - self.total_s, 0.0)

    def at(self, time: float) -> float:
        """The run's second of a unix time; a time between two attempts is the end of the earlier."""
        index = max(bisect_right(self._starts, time) - 1, 0)
        if not self._attempts:
            return 0.0
        attempt = self._attempts[index]
        return self._before[index] + min(max(time - attempt.start, 0.0), attempt.seconds)


class AttemptTimes:
    """The first and the last that is known of each attempt."""

    def __init__(self) -> None:
        self.newest = 0  # also one of which no time is known
        self._spans: dict[int, tuple[float, float]] = {}

    def extend(self, number: int | None, time: float) -> None:
        if number is None:
            return
        self.newest = max(self.newest, number)
        if time > 0:
            low, high = self._spans.get(number, (time, time))
            self._spans[number] = (min(low, time), max(high, time))

    def spans(self) -> tuple[AttemptSpan, ...]:
        """By number. One whose beginning was lost begins with the first that is known of it."""
        found: list[AttemptSpan] = []
        for number, (start, end) in sorted(self._spans.items()):
            begins = max(start, found[-1].end) if found else start  # a clock that was set back between two
            found.append(AttemptSpan(number=number, start=begins, end=max(end, begins)))
        return tuple(found)
