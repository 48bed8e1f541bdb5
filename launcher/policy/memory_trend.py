"""Does memory rise steadily towards its limit? Reported before a process is killed.

The slope is the median of all pairwise slopes (Theil 1950, Sen 1968): a step that comes and goes with each batch, or
one spike, moves a least-squares line, but not this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from launcher.config.supervision import MemoryConfig

MIN_SAMPLES = 8
RISING_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes in use at a time in seconds."""

    at: float
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrend:
    """`full_in_s`: seconds until the limit, where it rises; None else."""

    warns: bool
    reason: str
    full_in_s: float | None = None


def find_rise(samples: Sequence[MemorySample], limit: float, config: MemoryConfig) -> MemoryTrend:
    """From evenly spread samples of one process or device, oldest first, and the bytes that it may use at most."""
    if len(samples) < MIN_SAMPLES:
        return MemoryTrend(warns=False, reason=f"only {len(samples)} samples")
    slopes = [(b.used - a.used) / (b.at - a.at) for a, b in itertools.combinations(samples, 2) if b.at > a.at]
    slope = median(slopes) if slopes else 0.0
    rising = sum(s > 0 for s in slopes) / len(slopes) if slopes else 0.0
    if slope <= 0 or rising < RISING_SHARE:
        return MemoryTrend(warns=False, reason="no steady rise")
    full_in_s = max(limit - samples[-1].used, 0.0) / slope
    reason = f"rises by {slope * 60 / 2**20:.1f} MiB a minute, full in {full_in_s:.0f} s"
    return MemoryTrend(warns=full_in_s <= config.warn_before_s, reason=reason, full_in_s=full_in_s)
