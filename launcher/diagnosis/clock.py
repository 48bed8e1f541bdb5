"""Dates in logs as seconds, without a time zone: what a log's own wall clock showed, as if it were UTC.

Logs of one run are compared by them, so that a trainer's and a server's file need only come from clocks of one zone.
"""

from __future__ import annotations

import calendar
import time as wall

from launcher.diagnosis.words import STAMP

SEARCHED_BEFORE = (4096, 65536)
"""Bytes before a line without a date in which the last date is looked for: near first, it is cheaper."""
HEAD = 240


def stamp_in(data: bytes, start: int, end: int) -> float | None:
    """The first date in `data[start:end]`, in seconds."""
    match = STAMP.search(data, start, end)
    return None if match is None else _seconds(match.groups())


def stamp_before(data: bytes, position: int, reach: int) -> float | None:
    """The last date within `reach` bytes before `position`."""
    found = STAMP.findall(data, max(0, position - reach), position)
    return _seconds(found[-1]) if found else None


def _seconds(parts: tuple[bytes, ...]) -> float | None:
    year, month, day, hour, minute, second = (int(part) for part in parts[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24):
        return None
    fraction = float(b"0." + parts[6]) if parts[6] else 0.0
    return calendar.timegm((year, month, day, hour, minute, second)) + fraction


def from_unix(seconds: float) -> float:
    """Unix seconds as this machine's wall clock showed them, in the scale of the others."""
    return calendar.timegm(wall.localtime(seconds)) + seconds % 1


def say_time(seconds: float | None) -> str:
    return "" if seconds is None else wall.strftime("%Y-%m-%d %H:%M:%S", wall.gmtime(seconds))
