"""Values of a run's lines as numbers, whatever a damaged line has in their place."""

from __future__ import annotations

import math

from launcher.run_files.journal import Record, number_of
from launcher.run_files.run_paths import MOST_ATTEMPTS

MOST, MOST_WHOLE = 1e100, 2**53
MOST_SECONDS = 2.0**35
"""Unix seconds of the year 3058: what is later is damage, and would stretch every axis."""


def as_float(value: object, otherwise: float = math.nan) -> float:
    """What could not even be summed is infinite too."""
    number = number_of(value, otherwise)
    return math.copysign(math.inf, number) if abs(number) > MOST else number  # not of NaN: it compares as False


def as_unix_time(value: object) -> float:
    """Unix seconds; 0 where they are not known."""
    time = as_float(value)
    return time if math.isfinite(time) and 0 < time < MOST_SECONDS else 0.0


def without_endless_integers(line: Record) -> Record:
    """What no float holds is none: `f"{value:.1f}"` and a comparison by time would raise OverflowError."""
    return {key: None if type(value) is int and abs(value) >= MOST_WHOLE else value for key, value in line.items()}


def as_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST_WHOLE else None


def as_attempt(value: object) -> int | None:
    """As the counter of attempts takes it: one line with more would be the newest attempt for ever."""
    number = as_integer(value)
    return number if number is not None and number < MOST_ATTEMPTS else None
