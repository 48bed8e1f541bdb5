"""Compares times of CLOCK_MONOTONIC that may be of two machines, or of one before and after a restart."""

from __future__ import annotations

SAME_CLOCK_S = 60.0
"""Two machines booted within this of each other count as one: the wall clocks, by which others are compared, may differ
by seconds, and a correction by less would move times that are exact."""


def clock_shift(theirs: float, mine: float) -> float:
    """What to add to a time of another process's monotonic clock; 0 for the same clock."""
    shift = mine - theirs
    return shift if abs(shift) > SAME_CLOCK_S else 0.0
