"""Samples how much memory is used, and records when the host's is nearly full.

Each GPU of the node through NVML, where there is one; the host's memory, within the cgroup's limit. A look costs a
millisecond and is taken every SAMPLE_INTERVAL_S. A GPU is filled on purpose (sglang.mem_fraction_static), so a
nearly full one says nothing; launcher/resources/seen_memory.py compares it with its plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from launcher.resources.hardware import HOST_MEMORY, memory_in_use
from launcher.run_files.journal import Journal, LineLog

SAMPLE_INTERVAL_S = 10.0
"""Between two looks: more often fills the file and shows no more, less often misses the rise before a kill."""
NEARLY_FULL = 0.9
"""Of the limit. Beyond it the kernel soon takes pages of files away, and ends a process when none are left."""
ROOM_AGAIN = 0.8
"""Below it the next rise is reported too: a use that wavers around NEARLY_FULL is reported once."""

Reading = Mapping[str, tuple[float, float]]
"""Bytes used and bytes there are, by name: `host memory`, `GPU 0 memory`."""


class MemoryWatch:
    """Call `look` every SAMPLE_INTERVAL_S: a line of `series`. Each time that the host's memory gets nearly full
    is one event, `memory.rising`."""

    def __init__(
        self, journal: Journal, *, series: LineLog | None = None, read: Callable[[], Reading] = memory_in_use
    ) -> None:
        self._journal = journal
        self._series = series
        self._read = read
        self._is_reported = False

    def sample_memory(self) -> None:
        reading = self._read()
        if self._series is not None:
            self._series.append({"time": time.time(), "in_use": reading})
        if HOST_MEMORY not in reading:
            return
        used, limit = reading[HOST_MEMORY]
        if used < ROOM_AGAIN * limit:
            self._is_reported = False
        elif used >= NEARLY_FULL * limit and not self._is_reported:
            self._is_reported = True
            reason = f"{used / limit:.0%} of {limit / 2**30:.1f} GiB is in use"
            self._journal.record("memory.rising", subject=HOST_MEMORY, reason=reason, used=used, limit=limit)
