"""Dates in logs as seconds, without a time zone: what a log's own wall clock showed, as if it were UTC.

Logs of one run are compared by them: a trainer's and a server's file need only come from clocks of one zone.
"""

from __future__ import annotations

import calendar
import functools
import re
import time as wall

from launcher.diagnosis.reading.log_patterns import STAMP

SEARCHED_BEFORE = (4096, 65536)
"""Bytes before a line without a date in which the last date is looked for: near first, it is cheaper."""
HEAD = 240


def stamp_in(data: bytes, start: int, end: int) -> float | None:
    """The first date in `data[start:end]`, in seconds."""
    match = STAMP.search(data, start, end)
    return None if match is None else seconds_of(match)


def stamp_before(data: bytes, position: int, reach: int) -> float | None:
    """The last date within `reach` bytes before `position`."""
    found = [*STAMP.finditer(data, max(0, position - reach), position)]
    return seconds_of(found[-1]) if found else None


def seconds_of(match: re.Match[bytes]) -> float | None:
    """The date of a match of STAMP; None where it is none, such as month 19."""
    year, month, day, hour, minute, second, fraction = match.groups()
    if not (0 < int(month) <= 12 and 0 < int(day) <= 31 and int(hour) < 24):
        return None
    whole = _days(int(year), int(month), int(day)) + int(hour) * 3600 + int(minute) * 60 + int(second)
    return whole + float(b"0." + fraction) if fraction else float(whole)


@functools.lru_cache(maxsize=64)
def _days(year: int, month: int, day: int) -> int:
    """Seconds from the epoch to a day's beginning; a log has few days."""
    return calendar.timegm((year, month, day, 0, 0, 0))


def from_unix(seconds: float) -> float:
    """Unix seconds as this machine's wall clock showed them, in the scale of the others."""
    return calendar.timegm(wall.localtime(seconds)) + seconds % 1


def to_unix(seconds: float) -> float:
    """Unix seconds of a date that this machine's wall clock showed, without their fraction."""
    return wall.mktime(wall.gmtime(seconds))


def say_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 d 2 h`."""
    minutes = round(seconds / 60)
    if seconds < 180:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def say_time(seconds: float | None) -> str:
    return "" if seconds is None else wall.strftime("%Y-%m-%d %H:%M:%S", wall.gmtime(seconds))
