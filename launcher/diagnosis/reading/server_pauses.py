"""Finds when a server wrote nothing, and when it made no tokens, from samples of the dates in its log.

A hung server writes nothing about it. What shows it is the time between two of its lines, and above all between two
of its lines about batches (MADE_TOKENS): its HTTP process may still write. Of each 32 KiB the first and the last date
are read, and what lies between them by halves only where they lie far apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from launcher.diagnosis.reading.log_clock import STAMP, LogClock, say_duration
from launcher.diagnosis.reading.log_patterns import MADE_TOKENS
from launcher.diagnosis.reading.log_records import Kind, LogEvent, Role

SAMPLE_BYTES = 32 * 1024
LEAST_BYTES = 64
"""Less holds one line."""
SHORTEST_S = 60.0
"""Shorter pauses are not kept: training and checkpoints make servers wait as long."""
MOST_KEPT = 200
NEAR = (512, SAMPLE_BYTES)
"""Bytes before a place in which the last date is looked for, near first."""

Dated = tuple[int, float]
"""A place in the data, and its date."""
Look = Callable[[bytes, int, int], Dated | None]


class ServerPauses:
    """Takes the blocks of a log in order and keeps the longest pauses."""

    def __init__(self, name: str, clock: LogClock) -> None:
        """`clock`: of the log, which has looked at the same block."""
        self._name = name
        self._clock = clock
        self._last: dict[Kind, float] = {}
        self._longest: dict[Kind, list[tuple[float, float]]] = {Kind.SILENCE: [], Kind.NO_TOKENS: []}
        """(seconds, begin) of each pause, a heap."""

    @property
    def makes_tokens(self) -> bool:
        return Kind.NO_TOKENS in self._last

    def take_bytes(self, data: bytes) -> None:
        """`data` are the next lines."""
        for start in range(0, len(data), SAMPLE_BYTES):
            end = min(start + SAMPLE_BYTES, len(data))
            self._walk(Kind.SILENCE, data, start, end, self._first_line, self._last_line)
            self._walk(Kind.NO_TOKENS, data, start, end, self._first_tokens, self._last_tokens)

    def _walk(self, kind: Kind, data: bytes, start: int, end: int, first: Look, last: Look) -> None:
        """All dates between which a pause may lie, in order."""
        begin = first(data, start, end)
        if begin is None:
            return
        until = last(data, begin[0], end) or begin
        self._alive_at(kind, begin[1])
        if until[1] - begin[1] >= SHORTEST_S and until[0] - begin[0] > LEAST_BYTES:
            middle = (begin[0] + until[0]) // 2
            self._walk(kind, data, begin[0], middle, first, last)
            self._walk(kind, data, middle, end, first, last)
        self._alive_at(kind, until[1])

    def _alive_at(self, kind: Kind, time: float) -> None:
        last = self._last.get(kind, time)
        if time - last >= SHORTEST_S:
            heapq.heappush(self._longest[kind], (time - last, last))
            if len(self._longest[kind]) > MOST_KEPT:
                heapq.heappop(self._longest[kind])
        self._last[kind] = max(last, time)

    def found(self, end: float | None) -> list[LogEvent]:
        """The longest pauses, in order; and since when there was none to the end, with the fact `is_last`."""
        events = [
            self._pause(kind, begin, seconds, is_last=False)
            for kind, pauses in self._longest.items()
            for seconds, begin in sorted(pauses, key=lambda pause: pause[1])
        ]
        if (last := self._last.get(Kind.NO_TOKENS)) is not None:
            seconds = 0.0 if end is None else max(end - last, 0.0)
            events.append(self._pause(Kind.NO_TOKENS, last, seconds, is_last=True))
        return events

    def _pause(self, kind: Kind, begin: float, seconds: float, *, is_last: bool) -> LogEvent:
        return LogEvent(
            kind=kind,
            role=Role.SERVER,
            time=begin,
            last_time=begin + seconds,
            text=say_pause(kind, seconds),
            where=self._name,
            facts={"seconds": seconds, "is_last": is_last},
        )

    # ── dates ──

    def _first_line(self, data: bytes, start: int, end: int) -> Dated | None:
        match = STAMP.search(data, start, end)
        time = None if match is None else self._clock.seconds_of(match)
        return None if match is None or time is None else (match.start(), time)

    def _last_line(self, data: bytes, start: int, end: int) -> Dated | None:
        for reach in NEAR:
            for match in reversed([*STAMP.finditer(data, max(start, end - reach), end)]):
                if (time := self._clock.seconds_of(match)) is not None:
                    return match.start(), time
            if end - reach <= start:
                break
        return None

    def _first_tokens(self, data: bytes, start: int, end: int) -> Dated | None:
        return self._dated(data, data.find(MADE_TOKENS, start, end))

    def _last_tokens(self, data: bytes, start: int, end: int) -> Dated | None:
        return self._dated(data, data.rfind(MADE_TOKENS, start, end))

    def _dated(self, data: bytes, position: int) -> Dated | None:
        """The place with the date at the beginning of its line."""
        if position < 0:
            return None
        time = self._clock.stamp_in(data, data.rfind(b"\n", 0, position) + 1, position)
        return None if time is None else (position, time)


def say_pause(kind: Kind, seconds: float) -> str:
    return f"no {'line' if kind is Kind.SILENCE else 'batch'} for {say_duration(seconds)}"
