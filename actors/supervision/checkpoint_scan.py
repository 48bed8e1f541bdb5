"""Reads which checkpoints there are, in a thread: a disk that stalls must not stall the loop that answers for life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from launcher.base.errors import LauncherError
from launcher.policy.checkpoint_status import CheckpointFacts

SCAN_S = 2.0
"""Longest wait for the disk; while the same scan lasts, nobody waits for it again."""

Found = tuple[CheckpointFacts, ...]


class CheckpointScan:
    """`read` may block. `unreadable` is called with the reason, once each time that the disk can't be read any more."""

    def __init__(self, read: Callable[[], Found], *, unreadable: Callable[[str], None]) -> None:
        self._read = read
        self._unreadable = unreadable
        self._found: Found | None = None
        self._is_away = False
        self._reading: asyncio.Task[Found] | None = None
        self._is_outdated = False

    def invalidate(self) -> None:
        """Something was changed: what a scan that is under way finds is not used."""
        self._is_outdated = True

    async def latest(self) -> Found:
        """As last seen, where the disk can't be read now: a run that steps needs none of them, and to take it for one
        that has none would start it over. Raises CheckpointError and JournalError where it never could be read."""
        try:
            self._found, self._is_away = await self._scan(), False
        except (LauncherError, TimeoutError) as error:
            if self._found is None:
                raise
            if not self._is_away:
                no_answer = f"no answer from its disk within {SCAN_S:g} s"
                self._unreadable(error.message if isinstance(error, LauncherError) else no_answer)
            self._is_away = True
        return self._found

    async def _scan(self) -> Found:
        while True:
            is_new = self._reading is None
            if self._reading is None:
                self._is_outdated = False
                self._reading = asyncio.create_task(asyncio.to_thread(self._read))
            wait_s = None if self._found is None else SCAN_S if is_new else 0.0
            done, _ = await asyncio.wait([self._reading], timeout=wait_s)
            if not done:
                raise TimeoutError
            reading, self._reading = self._reading, None
            if not self._is_outdated:
                return reading.result()
            reading.exception()  # of no use to anybody

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
