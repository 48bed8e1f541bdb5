"""Samples how much memory is used, and records a steady rise before memory is full.

Each GPU of the node through NVML, where there is one; the host's memory, within the cgroup's limit. A look costs a
millisecond and is taken every `memory.sample_interval_s`. What a rise is: launcher/policy/memory_trend.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from launcher.config.supervision import MemoryConfig
from launcher.policy.memory_trend import MemorySample, find_rise
from launcher.resources.hardware import memory_in_use
from launcher.run_files.journal import Journal, LineLog

MOST_SAMPLES = 60

Reading = Mapping[str, tuple[float, float]]
"""Bytes used and bytes there are, by name: `host memory`, `GPU 0 memory`."""


class MemoryWatch:
    """Call `look` every memory.sample_interval_s: a line of `series`. Each rise is one event, `memory.rising`."""

    def __init__(
        self,
        settings: MemoryConfig,
        journal: Journal,
        *,
        series: LineLog | None = None,
        read: Callable[[], Reading] = memory_in_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._series = series
        self._read = read
        self._clock = clock
        self._samples: dict[str, deque[MemorySample]] = {}
        self._reported: set[str] = set()

    def look(self, *, is_starting: bool = False) -> None:
        """`is_starting`: a server is, which takes memory and is no rise."""
        now = self._clock()
        reading = self._read()
        if self._series is not None:
            self._series.append({"time": time.time(), "in_use": reading})
        for name, (used, limit) in reading.items():
            samples = self._samples.setdefault(name, deque(maxlen=MOST_SAMPLES))
            samples.append(MemorySample(at=now, used=used))
            if is_starting:
                samples.clear()
            self._judge(name, limit)

    def _judge(self, name: str, limit: float) -> None:
        samples = self._samples[name]
        trend = find_rise(samples, limit, self._settings)
        if trend.warns and name not in self._reported:
            self._journal.record(
                "memory.rising",
                subject=name,
                reason=trend.reason,
                full_in_s=trend.full_in_s,
                used=samples[-1].used,
                limit=limit,
            )
        self._reported = self._reported | {name} if trend.warns else self._reported - {name}
