"""When the lines of a log were written, in unix seconds, also where its clock is of another zone than this machine's.

A container is often in UTC, whatever its host is in, and the logs of a run may lie on another machine's disk.
"""

from __future__ import annotations

import math

from launcher.base.utc_offsets import local_offsets
from launcher.diagnosis.reading.log_clock import QUARTER_S, SKEW_S, LogClock, WallScale
from launcher.diagnosis.reading.time_zones import WallClock, zone_of

DAY_S = 86_400
AROUND_DAYS = 400
"""Of this machine's changes of summer time, before the last line and after it."""
UNDATED_S = 3600.0
"""So long a log may get lines without a date after its last one that has a date; few zones differ by less."""
ZONES_S = 26 * 3600.0
"""What is older than any two zones differ is old in each of them."""


class LogTimes:
    """Of some bytes of a log. `changed_at`: when the file was written last."""

    def __init__(self, data: bytes, *, changed_at: float) -> None:
        self._data = data
        self._clock = LogClock()
        self._clock.note_dates(data)
        scale = self._clock.scale()
        last = None if scale is None else self._clock.stamp_before(data, len(data), len(data))
        self._wall = None if scale is None or last is None else _wall_clock(scale, last, changed_at)
        self._is_known = scale is None or self._wall is not None

    def within(self, start: int, end: int) -> float | None:
        """Of the first date there; None where there is none, or its zone is not known."""
        return self._unix(self._clock.stamp_in(self._data, start, end))

    def before(self, position: int, reach: int) -> float | None:
        """Of the last date within `reach` bytes before `position`."""
        return self._unix(self._clock.stamp_before(self._data, position, reach))

    def _unix(self, seconds: float | None) -> float | None:
        if seconds is None or not self._is_known:
            return None
        return seconds if self._wall is None else self._wall.to_unix(seconds)


def _wall_clock(scale: WallScale, last: float, changed_at: float) -> WallClock | None:
    """By what the log itself shows; else by this machine's zone, where the file's last date is then as old as the
    file's last change; else by that change."""
    if (measured := zone_of(scale.anchors, scale)) is not None:
        return WallClock(measured, scale.put_back)
    here = WallClock(local_offsets(last - AROUND_DAYS * DAY_S, 2 * AROUND_DAYS), scale.put_back)
    age_s = changed_at - here.to_unix(last)
    if -SKEW_S <= age_s < QUARTER_S:
        return here
    if (
        abs(age_s) < ZONES_S and (age_s + SKEW_S) % QUARTER_S < 2 * SKEW_S
    ):  # as if it was written at this moment, on a clock of another zone
        shift = scale.put_back[-1].shift if scale.put_back else 0
        offset = math.ceil((last - shift - changed_at - SKEW_S) / QUARTER_S) * QUARTER_S
        return WallClock(((-math.inf, offset),), scale.put_back)
    return here if 0 <= age_s < UNDATED_S or age_s >= ZONES_S else None
