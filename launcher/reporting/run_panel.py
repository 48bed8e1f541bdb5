"""A run on the screen of whoever looks at it: lines, and below them the panel of its progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from launcher.reporting.current_status import CurrentStatus
from launcher.reporting.live_display import Display
from launcher.reporting.run_view import RunProgress
from launcher.run_files.journal import Record


class RunPanel:
    """`begin` comes before a panel is shown; lines may be printed at any time."""

    def __init__(self, out: TextIO) -> None:
        self._display = Display(out)
        self._progress: RunProgress | None = None
        self._now: CurrentStatus | None = None

    def begin(self, title: str, attempt: int, *, started: float) -> None:
        """Of an attempt without any step yet. `started`: monotonic."""
        self._progress = RunProgress(title, attempt, started=started)
        self._now = None

    def line(self, text: str) -> None:
        self._display.line(text)
        if self._progress is not None:
            self._progress.last_event = text

    def show(self, now: CurrentStatus | None, steps: Sequence[Record]) -> None:
        """`now` None: as it was the last time. `steps`: lines of metrics.jsonl since then."""
        if self._progress is None:
            return
        self._progress.add(steps)
        self._now = now or self._now
        if (now is not None or steps) and self._now is not None and self._now.status is not None:
            view = self._progress.view(
                self._now.status, servers=self._now.servers, evals=self._now.evals, now=time.monotonic()
            )
            self._display.update(view)

    def close(self) -> None:
        """The last panel stays on the screen. Lines may still be printed."""
        self._display.close()
