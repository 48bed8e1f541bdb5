"""A LineLog that writes on a thread of its own: a slow disk must not delay the event loop that appends to it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from launcher.run_files.journal import LineLog, Record

log = logging.getLogger(__name__)


class BackgroundLineLog(LineLog):
    """`append` returns at once. One thread writes the records, in the order in which they were appended."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        super().__init__(path, durable=durable)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"write {path.name}")

    def append(self, record: Record) -> bool:
        """True: whether the disk takes it is not known yet. What it refuses is kept, as a LineLog does."""
        self._thread.submit(super().append, dict(record)).add_done_callback(self._report)
        return True

    def flush(self) -> bool:
        """Waits until everything appended so far was tried."""
        return self._thread.submit(super().flush).result()

    def _report(self, written: Future[bool]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            log.error("%s: a line was not written: %r", self.path, error)
