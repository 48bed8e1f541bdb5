"""Durations, dates, shares and large numbers as short texts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

NONE = "—"


def seconds(value: float | None) -> str:
    """`40 ms`, `0.25 s`, `9.1 s`, `5.0 min`, `3.2 h`."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 0.1:
        return f"{1000 * max(value, 0.0):.0f} ms"
    if value < 1:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def duration(value: float) -> str:
    """`4.2 s`, `3:07` or `2:03:07`."""
    if value < 10:
        return f"{max(value, 0.0):.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(value: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def spread(values: Sequence[float | None]) -> str:
    """`4.2 s (3.1 s to 9.0 s)`: the median, and the range where there are several."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return seconds(known[0] if known else None)
    return f"{seconds(median(known))} ({seconds(min(known))} to {seconds(max(known))})"


def when(at: float) -> str:
    """Date and time in the zone of the machine that writes the page."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def clock_text(value_s: float) -> str:
    """`0:45`, `12:30`, `3:20 h`, `2 d 4 h`."""
    whole = round(value_s)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 2 * 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def short(value: float) -> str:
    """`950`, `12k`, `1.5M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
