"""Shows a running run from its files alone, as its own driver does, and ends with its exit code.

    events.jsonl ─► lines      metrics.jsonl ─► rewards, pace      now.json ─► phase, servers      ─► the same panel

Ctrl-C detaches; the run continues.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.reporting.current_status import CurrentStatus
from launcher.reporting.event_lines import tell
from launcher.reporting.live_display import Display, FollowedRun
from launcher.reporting.run_view import STEPS_REMEMBERED, RunProgress
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_attempt

POLL_S = 0.25
SILENT_S = 60.0
"""Without a heartbeat: the driver is gone, or its disk hangs."""
SUMMARY_S = 20.0
"""For the summary that the driver writes after the run's last event."""
LOST = 3


class Attached:
    """`total_epochs` and the rest of what the panel names come from the run's own files."""

    def __init__(self, paths: RunPaths, out: TextIO) -> None:
        self._paths = paths
        self._display = Display(out)
        self._run = FollowedRun(paths)
        self._attempt: int | None = None
        self._silent_s = 0.0  # by turns: after a pause of the whole machine the driver has its whole time again

    def follow(self) -> int:
        """Until the run has ended; its exit code. LOST where it gives no sign of life any more."""
        with contextlib.closing(self._display), contextlib.suppress(KeyboardInterrupt):
            while True:
                if (code := self._ended()) is not None:
                    return code
                self._show(self._run.new_status())
                self._silent_s += POLL_S
                if self._silent_s > SILENT_S:
                    self._display.line(
                        f"the run has written nothing for {SILENT_S:g} s: its driver, or its cluster, is gone\n"
                        "  → the command that started it resumes from its last step"
                    )
                    return LOST
                time.sleep(POLL_S)
        print("no longer attached; the run continues", flush=True)
        return 0

    def _ended(self) -> int | None:
        for event in self._run.new_events():
            if line := tell(event):
                self._display.line(line)
            status = ENDS.get(str(event.get("event")))
            attempt = as_attempt(event.get("attempt")) or self._attempt
            if status is not None and (attempt or 0) >= (self._attempt or 0):  # an earlier one may write late
                self._display.close()
                self._show_end(status, str(event.get("reason")))
                code = event.get("exit_code")
                return code if isinstance(code, int) else EXIT_CODES[status]
        return None

    def _show_end(self, status: TerminalStatus, reason: str) -> None:
        give_up_at = time.monotonic() + SUMMARY_S
        began = time.time() - SUMMARY_S
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError):
                if self._paths.summary.stat().st_mtime > began:
                    self._display.line(self._paths.summary.read_text())
                    return
            time.sleep(POLL_S)
        self._display.line(f"{status}: {reason}")

    def _show(self, now: CurrentStatus | None) -> None:
        steps: Sequence[Record] = self._run.new_steps()
        if now is not None:
            self._silent_s = 0.0
            if now.attempt != self._attempt:
                self._attempt = now.attempt
                self._display.begin(self._paths.title, now.attempt, started=time.monotonic() - now.elapsed_s)
                steps = _last(self._paths.metrics, now.attempt)
        self._display.show(now, [line for line in steps if line.get("attempt") == self._attempt])


def attach(paths: RunPaths) -> int:
    return Attached(paths, sys.stdout).follow()


def progress_of(paths: RunPaths, now: CurrentStatus) -> RunProgress:
    """As its driver began it, without any step yet."""
    return RunProgress(paths.title, now.attempt, started=time.monotonic() - now.elapsed_s)


def _last(metrics: Path, attempt: int) -> Sequence[Record]:
    return [line for line in read_lines(metrics) if line.get("attempt") == attempt][-STEPS_REMEMBERED:]
