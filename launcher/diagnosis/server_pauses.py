"""When a server fell silent, and when it made no tokens: the dates in its log, sampled.

A hung server writes nothing that says so. What tells is the time between two of its lines, and above all between two
of its lines about batches (words.MADE_TOKENS): its HTTP half may go on talking. Dates are read once every 32 KiB, and
line by line only where two samples lie far apart; a log that is large for its time has nothing to read there.
"""

from __future__ import annotations

import heapq

from launcher.diagnosis import clock
from launcher.diagnosis.records import Happening, Kind, Role
from launcher.diagnosis.words import MADE_TOKENS, STAMP

SAMPLE_BYTES = 32 * 1024
SHORTEST_S = 60.0
"""A pause shorter than this is none: training and checkpoints make servers wait as long."""
MOST_KEPT = 200

Pause = tuple[float, float, int | None]


class ServerPauses:
    """Takes the blocks of a log in order and keeps the longest pauses."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[Kind, float] = {}
        self._kept: dict[Kind, list[tuple[float, Pause]]] = {Kind.SILENCE: [], Kind.NO_TOKENS: []}
        self._step: int | None = None

    @property
    def makes_tokens(self) -> bool:
        return Kind.NO_TOKENS in self._last

    def take(self, data: bytes, limit: int, step: int | None) -> None:
        """`data[:limit]` are the next lines, written after `step` was done (where the log knows of steps)."""
        self._step = step
        for start in range(0, limit, SAMPLE_BYTES):
            end = min(start + SAMPLE_BYTES, limit)
            self._lines(data, start, end)
            for words in MADE_TOKENS:
                self._tokens(data, start, end, words)

    def _lines(self, data: bytes, start: int, end: int) -> None:
        first = clock.stamp_in(data, start, end)
        last = clock.stamp_before(data, end, min(4096, end - start))
        if first is None:
            return
        self._went_on(Kind.SILENCE, first)
        if last is not None and last - first >= SHORTEST_S:
            for match in STAMP.finditer(data, start, end):
                if (time := clock.stamp_in(data, match.start(), match.end())) is not None:
                    self._went_on(Kind.SILENCE, time)
        if last is not None:
            self._went_on(Kind.SILENCE, last)

    def _tokens(self, data: bytes, start: int, end: int, words: bytes) -> None:
        first, last = data.find(words, start, end), data.rfind(words, start, end)
        if first < 0:
            return
        begin, until = self._date_at(data, first), self._date_at(data, last)
        if begin is not None and until is not None and until - begin >= SHORTEST_S:
            while 0 <= first < last:
                if (time := self._date_at(data, first)) is not None:
                    self._went_on(Kind.NO_TOKENS, time)
                first = data.find(words, first + 1, end)
        for time in (begin, until):
            if time is not None:
                self._went_on(Kind.NO_TOKENS, time)

    def _date_at(self, data: bytes, position: int) -> float | None:
        start = data.rfind(b"\n", 0, position) + 1
        return clock.stamp_in(data, start, position)

    def _went_on(self, kind: Kind, time: float) -> None:
        last = self._last.get(kind)
        if last is not None and time - last >= SHORTEST_S:
            heapq.heappush(self._kept[kind], (time - last, (last, time, self._step)))
            if len(self._kept[kind]) > MOST_KEPT:
                heapq.heappop(self._kept[kind])
        if last is None or time > last:
            self._last[kind] = time

    def found(self, end: float | None) -> list[Happening]:
        """The longest pauses, in order; and since when there was none to the end, with the fact `is_last`."""
        happenings = [
            self._happening(kind, pause, is_last=False)
            for kind, kept in self._kept.items()
            for _, pause in sorted(kept, key=lambda item: item[1][0])
        ]
        if (last := self._last.get(Kind.NO_TOKENS)) is not None:
            until = last if end is None else max(end, last)
            happenings.append(self._happening(Kind.NO_TOKENS, (last, until, self._step), is_last=True))
        return happenings

    def _happening(self, kind: Kind, pause: Pause, *, is_last: bool) -> Happening:
        begin, end, step = pause
        return Happening(
            kind=kind,
            role=Role.SERVER,
            time=begin,
            last_time=end,
            after_step=step,
            text=f"no {'line' if kind is Kind.SILENCE else 'batch'} for {end - begin:.0f} s",
            where=self._name,
            facts={"seconds": end - begin, "is_last": is_last},
        )
