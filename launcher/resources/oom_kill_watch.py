"""Has the kernel killed a process for want of memory lately? Whoever hears of an end asks."""

from __future__ import annotations

from launcher.resources.hardware import oom_kills, oom_kills_told_by


class KillWatch:
    """Counts from the look before the last: a look may fall between the kill and the news of it.

    Where the kernel counts for each cgroup, the count is that of who is looked at, which may be moved to another one.
    """

    def __init__(self) -> None:
        self._file, count = oom_kills()
        self._counts = count, count

    def look(self, pid: int | None = None) -> None:
        """While `pid` lives; None: this process."""
        file, count = oom_kills(pid)
        self._counts = (self._counts[1], count) if file == self._file else (count, count)
        self._file = file

    def risen(self) -> int:
        """How many it has killed since."""
        return max(0, oom_kills_told_by(self._file) - self._counts[0])
