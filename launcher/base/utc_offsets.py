"""The zone of this machine as offsets from UTC and the moments from which each holds.

A name such as `Europe/Berlin` would need the reader's own tables of zones; what TZ is set to may have no name.
"""

from __future__ import annotations

import time

AHEAD_DAYS = 400
"""A run that begins today meets each change of the coming year before its next attempt writes them again."""
DAY_S = 86_400

Offsets = tuple[tuple[float, int], ...]
"""(unix seconds, seconds east of UTC from then on), in order."""


def local_offsets(since: float, days: int = AHEAD_DAYS) -> Offsets:
    """Of this machine's zone."""
    begin = int(since)
    found = [(since, _offset_at(begin))]
    for day in range(days):
        low, high = begin + day * DAY_S, begin + (day + 1) * DAY_S
        if _offset_at(low) == _offset_at(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _offset_at(middle) == found[-1][1] else (low, middle)
        found.append((float(high), _offset_at(high)))
    return tuple(found)


def _offset_at(unix: int) -> int:
    return time.localtime(unix).tm_gmtoff
