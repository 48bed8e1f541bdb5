"""The clock of one text log: its dates as seconds, in the order in which they were written.

A log has one of two scales. Where its dates name their zone (`Z`, `+05:45`) they are unix seconds. Where they don't,
they are what a wall clock of unknown zone showed, as if it were UTC, and made to rise over an hour that came twice
(clocks are put back in autumn). What the one kind says in a log of the other is measured by the dates beside it.
How wall clocks become unix seconds is decided when all files are read: launcher/diagnosis/reading/time_zones.py.
"""

from __future__ import annotations

import calendar
import functools
import re
import time as wall
from dataclasses import dataclass
from itertools import pairwise

STAMP = re.compile(
    rb"(20\d\d)-?([01]\d)-?([0-3]\d)[-T ]([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?"
    rb"(Z\b| ?(?:UTC|GMT)\b| ?[+-][01]\d:?[0-5]\d\b)?"
)
"""A date; its last group is its zone, where it says one."""

SEARCHED_BEFORE = (4096, 65536)
"""Bytes before a line without a date in which the last date is looked for: near first, it is cheaper."""
HEAD = 240
QUARTER_S = 900
"""Offsets of zones are multiples of a quarter of an hour."""
SKEW_S = 60
"""Two lines that follow each other may be this far out of order: they are written by several processes."""
WALKED = 2 * 2**20
"""Bytes of a block in which every date is looked at: a small log may have an hour in two lines."""
SAMPLED, SEARCHED = 16 * 1024, 4096
"""Bytes from one sample of a larger block's dates to the next, and how far each is looked for."""
JUDGED = 200
"""Dates at the beginning of a log by which it is decided whether its dates name their zone."""
PUT_BACK_S = (1500, 3600)
"""A clock that is put back at the end of summer time goes back by half an hour or an hour, less the pause there."""
HOUR_S, SHORT_S = 3600, 300
SUNDAY, LATEST_HOUR = 6, 3
"""Nearly all zones change their clocks in the night to a Sunday, from midnight to three."""
CONFIRMED_BY = 5
"""Dates after one that went back, none later than it was before: a single line that came late is no clock."""
DAY_S = 86_400
"""Two zones differ by less, and no clock is put back twice in a day."""
MANY_TURNS = 4
LINE_HEAD = 80
"""Bytes from a line's beginning to its own date, at most."""
OUR_MARK = b"==== "
"""Begins the lines that we write into a server's log; their dates name their zone."""
MOST_ANCHORS = 1000


@dataclass(frozen=True, slots=True)
class Anchor:
    """A moment that is known on both scales: `wall` (made to rise) and `unix`, which differ by a zone's offset and how
    long one was written after the other."""

    wall: float
    unix: float

    @property
    def offset(self) -> int:
        """To the quarter of an hour."""
        return round((self.wall - self.unix) / QUARTER_S) * QUARTER_S


@dataclass(frozen=True, slots=True)
class PutBack:
    """From `wall` (made to rise) on, the clock showed `shift` seconds less."""

    wall: float
    shift: int


@dataclass(frozen=True, slots=True)
class WallScale:
    """Of a log whose dates name no zone: where its clock was put back, and may have been put forward, and what ties it
    to unix seconds. Its contents' times are of this clock until they are brought to another."""

    put_back: tuple[PutBack, ...] = ()
    put_forward: tuple[float, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    is_mixed: bool = False
    """Its lines are of several clocks, as a merged log's of machines in two zones are."""


class LogClock:
    """Give each block to `look` before its dates are asked for; positions are of the last block."""

    def __init__(self) -> None:
        self.names_zone: bool | None = None
        """None while no date was seen."""
        self.put_back: list[PutBack] = []
        self.put_forward: list[float] = []
        """Where an hour is missing as one is when summer time begins; it may be a pause all the same."""
        self.anchors: list[Anchor] = []
        self._shifts: list[tuple[int, int]] = [(0, 0)]
        """(position, shift) of this block: from there on, the clock showed so much less."""
        self._last: float | None = None
        self._is_behind = False
        self._turns = 0

    def note_dates(self, data: bytes) -> None:
        """See whether dates name their zone, and where the clock was put back."""
        self._shifts = [(0, self._shifts[-1][1])]
        if self.names_zone is None:
            self._judge(data)
        if self.names_zone is False:
            self._find_put_back(data)
            self._find_marks(data)

    def scale(self) -> WallScale | None:
        """None where its dates are unix seconds."""
        if self.names_zone:
            return None
        folds = pairwise(self.put_back)
        is_mixed = self._turns >= MANY_TURNS or any(after.wall - before.wall < DAY_S for before, after in folds)
        return WallScale(tuple(self.put_back), tuple(self.put_forward), tuple(self.anchors), is_mixed)

    # ── dates of the block ──

    def stamp_in(self, data: bytes, start: int, end: int) -> float | None:
        """The first date in `data[start:end]`, in seconds."""
        match = STAMP.search(data, start, end)
        return None if match is None else self.seconds_of(match)

    def stamp_before(self, data: bytes, position: int, reach: int) -> float | None:
        """The last date within `reach` bytes before `position`."""
        for match in reversed([*STAMP.finditer(data, max(0, position - reach), position)]):
            if (seconds := self.seconds_of(match)) is not None:
                return seconds
        return None

    def seconds_of(self, match: re.Match[bytes]) -> float | None:
        """The date of a match of STAMP in the log's scale; None where it is none, such as month 19, or not known."""
        seconds, has_zone = read_stamp(match)
        if seconds is None or has_zone == bool(self.names_zone):
            return seconds if seconds is None or has_zone else seconds + self._shift_at(match.start())
        return self._measured(match, seconds) if has_zone else None

    def _shift_at(self, position: int) -> int:
        return next(shift for start, shift in reversed(self._shifts) if start <= position)

    def _measured(self, match: re.Match[bytes], unix: float) -> float | None:
        """A date with a zone among dates without: by the next of those. It was written later, so that the offset is at
        most their difference; the one before may be long ago."""
        data = match.string
        after = self._wall_after(data, match.end())
        if after is None:
            return unix + self.anchors[-1].offset if self.anchors else None
        anchor = Anchor(unix + (after - unix + SKEW_S) // QUARTER_S * QUARTER_S, unix)
        if len(self.anchors) < MOST_ANCHORS and anchor not in self.anchors[-2:]:
            self.anchors.append(anchor)
        return anchor.wall

    def _wall_after(self, data: bytes, start: int) -> float | None:
        for match in STAMP.finditer(data, start, min(start + SEARCHED, len(data))):
            seconds, has_zone = read_stamp(match)
            if seconds is not None and not has_zone:
                return seconds + self._shift_at(match.start())
        return None

    # ── looking over a block ──

    def _judge(self, data: bytes) -> None:
        counts = [0, 0]
        for number, match in enumerate(STAMP.finditer(data)):
            counts[bool(match[8])] += 1
            if number == JUDGED:
                break
        if any(counts):
            self.names_zone = counts[1] > counts[0]

    def _find_marks(self, data: bytes) -> None:
        at = data.find(OUR_MARK)
        while at >= 0:
            end = data.find(b"\n", at)
            if (at == 0 or data[at - 1 : at] == b"\n") and len(self.anchors) < MOST_ANCHORS:
                self.stamp_in(data, at, min(end if end >= 0 else len(data), at + HEAD))
            at = data.find(OUR_MARK, at + len(OUR_MARK))

    def _find_put_back(self, data: bytes) -> None:
        """Date by date where that is cheap; else by samples, and date by date where two of them lie far apart."""
        if len(data) <= WALKED:
            self._step_over(data, 0, len(data))
            return
        seen = 0
        for start in range(0, len(data), SAMPLED):
            match = STAMP.search(data, start, start + SEARCHED)
            seconds = None if match is None else read_stamp(match)[0]
            if match is None or seconds is None or match[8]:
                continue
            if self._last is not None and abs(seconds + self._shifts[-1][1] - self._last) > PUT_BACK_S[0]:
                self._step_over(data, seen, match.end())
            self._last = max(seconds + self._shifts[-1][1], self._last or 0.0)
            seen = match.start()

    def _step_over(self, data: bytes, start: int, end: int) -> None:
        for match in STAMP.finditer(data, start, end):
            seconds = read_stamp(match)[0]
            if seconds is None or match[8]:
                continue
            at = seconds + self._shifts[-1][1]
            if data.rfind(b"\n", max(match.start() - LINE_HEAD, 0), match.start()) < 0 and match.start() > LINE_HEAD:
                continue  # a date in a line's text
            self._count_turn(at)
            if self._last is not None and (shift := _shift_of(self._last, at)) and self._is_confirmed(data, match):
                self._shifts.append((match.start(), self._shifts[-1][1] + shift))
                self.put_back.append(PutBack(at + shift, self._shifts[-1][1]))
                at += shift
            if self._last is not None and (missing := _missing_hour(self._last, at)) is not None:
                self.put_forward.append(missing)
            self._last = max(at, self._last or 0.0)

    def _count_turn(self, at: float) -> None:
        """How often dates went back and came forward again: lines of several clocks do so again and again."""
        behind_s = 0.0 if self._last is None else self._last - at
        if PUT_BACK_S[0] <= behind_s <= DAY_S:
            self._turns += not self._is_behind
            self._is_behind = True
        elif behind_s <= SKEW_S:
            self._is_behind = False

    def _is_confirmed(self, data: bytes, match: re.Match[bytes]) -> bool:
        later = STAMP.finditer(data, match.end())
        dates = (read_stamp(one)[0] for one, _ in zip(later, range(CONFIRMED_BY), strict=False) if not one[8])
        return all(date is None or date + self._shifts[-1][1] <= (self._last or 0.0) for date in dates)


def _shift_of(last: float, now: float) -> int:
    """By how much the clock was put back between two dates; 0 where it was not: within the hour that came twice."""
    back = last - now
    if not PUT_BACK_S[0] <= back <= PUT_BACK_S[1]:
        return 0
    shift = -(-int(back) // 1800) * 1800
    begin = now // 1800 * 1800
    return shift if last < begin + shift else 0


def _missing_hour(last: float, now: float) -> float | None:
    """The full hour in the night to a Sunday from which on one is missing between two dates, and hardly more."""
    begin = -(-last // HOUR_S) * HOUR_S
    is_missing = now - last >= HOUR_S and begin - last <= SHORT_S and HOUR_S <= now - begin <= HOUR_S + SHORT_S
    at = wall.gmtime(begin)
    return begin if is_missing and at.tm_wday == SUNDAY and at.tm_hour <= LATEST_HOUR else None


def read_stamp(match: re.Match[bytes]) -> tuple[float | None, bool]:
    """Seconds of a match of STAMP, and whether it names its zone: then they are unix seconds. None: it is no date."""
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    if not (0 < int(month) <= 12 and 0 < int(day) <= 31 and int(hour) < 24):
        return None, False
    whole = float(_days(int(year), int(month), int(day)) + int(hour) * 3600 + int(minute) * 60 + int(second))
    whole += float(b"0." + fraction) if fraction else 0.0
    return (whole, False) if zone is None else (whole - _offset_of(zone), True)


@functools.lru_cache(maxsize=64)
def _offset_of(zone: bytes) -> int:
    digits = zone.strip().lstrip(b"+-").replace(b":", b"")
    if not digits.isdigit():
        return 0  # Z, UTC, GMT
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if b"-" in zone else seconds


@functools.lru_cache(maxsize=64)
def _days(year: int, month: int, day: int) -> int:
    """Seconds from the epoch to a day's beginning; a log has few days."""
    return calendar.timegm((year, month, day, 0, 0, 0))


def say_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 d 2 h`."""
    minutes = round(seconds / 60)
    if seconds < 180:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
