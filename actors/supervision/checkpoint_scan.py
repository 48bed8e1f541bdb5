"""Reads which checkpoints there are, in a thread: a disk that stalls must not stall the loop that answers for life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from launcher.base.errors import CheckpointError, LauncherError

SCAN_S = 2.0
"""Longest wait for the disk; while the same scan lasts, nobody waits for it again."""

AGAIN_S = 60.0
"""Longest gap between two readings that belong to one trouble of the disk: the plan may have needed none meanwhile."""

Found = TypeVar("Found")


class CheckpointScan(Generic[Found]):
    """`read` may block. `unreadable` is called with the reason, once each time that the disk can't be read any more;
    after `patience_s` of that the run can't go on. `was_read`: by a Coordinator before this one."""

    def __init__(
        self,
        read: Callable[[], Found],
        *,
        unreadable: Callable[[str], None],
        patience_s: float,
        was_read: bool = False,
    ) -> None:
        self._read = read
        self._unreadable = unreadable
        self._patience_s = patience_s
        self._was_read = was_read
        self._away_since: float | None = None
        self._asked_at = float("-inf")
        self._reading: asyncio.Task[Found] | None = None
        self._is_outdated = False

    def invalidate(self) -> None:
        """Something was changed: what a scan that is under way finds is not used."""
        self._is_outdated = True

    async def read(self) -> Found | None:
        """None where the disk can't be read now: to take it for one that has none would start the run over, and to
        choose among those of the last time would lose the steps since. Raises CheckpointError and JournalError where it
        never could be read, or not for too long."""
        try:
            found = await self._scan()
        except (LauncherError, TimeoutError) as error:
            self._note_away(error)
            return None
        self._was_read = True
        self._away_since = None
        return found

    def _note_away(self, error: LauncherError | TimeoutError) -> None:
        now = time.monotonic()
        is_new = self._away_since is None or now - self._asked_at > AGAIN_S
        self._asked_at = now
        if isinstance(error, LauncherError) and not self._was_read:
            raise error
        if self._away_since is None or is_new:
            self._away_since = now
            no_answer = f"no answer from its disk within {SCAN_S:g} s"
            self._unreadable(error.message if isinstance(error, LauncherError) else no_answer)
        elif now - self._away_since > self._patience_s:
            if isinstance(error, LauncherError):
                raise error
            raise CheckpointError(
                f"the disk of the checkpoints has not answered for {now - self._away_since:.0f} s",
                "that is more than disk.patience_s: look at its disk",
            )

    async def _scan(self) -> Found:
        while True:
            is_new = self._reading is None
            if self._reading is None:
                self._is_outdated = False
                self._reading = asyncio.create_task(asyncio.to_thread(self._read))
            done, _ = await asyncio.wait([self._reading], timeout=SCAN_S if is_new else 0.0)
            if not done:
                raise TimeoutError
            reading = self._reading
            self._reading = None
            if not self._is_outdated:
                return reading.result()
            reading.exception()  # of no use to anybody

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
