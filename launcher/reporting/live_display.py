"""A run as whoever looks at it sees it, from its files alone: its driver does so, and `attach`.

events.jsonl ─► what happens ─┐
metrics.jsonl ─► its steps ───┼─► FollowedRun ─► Display: a panel of Rich in a terminal, plain lines elsewhere
now.json ─► phase, servers ───┘
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.live import Live

from launcher.reporting.current_status import CurrentStatus, read_now
from launcher.reporting.event_lines import EventTail
from launcher.reporting.run_view import RunProgress, RunView
from launcher.reporting.terminal_panel import render_line, render_panel
from launcher.reporting.terminal_text import SafeConsole, discard, visible_on
from launcher.run_files.journal import Record
from launcher.run_files.run_paths import RunPaths

LINE_EVERY_S = 2.0
"""At most so often a line about a step, where lines are written; the last step always has one."""
HEARTBEAT_S = 60.0
"""After so long without a step, a line reports what the run is waiting for."""


class Display:
    """Lines, and below them the panel of the run's progress, once it has begun. Safe to call from several threads.

    In a terminal, what others print (Ray forwards its workers' output) scrolls by above the panel. Its errors never
    end a run: a stream that breaks, such as a pipe to `head`, silences the display and nothing else.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = visible_on(stream)
        self._lock = threading.RLock()
        self._broken = False
        self._shown: RunView | None = None  # the last view that got a line of its own
        self._live: Live | None = None
        self._console = SafeConsole(stream) if _is_live(stream) else None
        self._progress: RunProgress | None = None
        self._now: CurrentStatus | None = None

    def begin(self, title: str, attempt: int, *, started: float) -> None:
        """Of an attempt without any step yet. `started`: monotonic."""
        self._progress = RunProgress(title, attempt, started=started)
        self._now = None

    def show(self, now: CurrentStatus | None, steps: Sequence[Record]) -> None:
        """`now` None: as it was the last time. `steps`: lines of metrics.jsonl since then."""
        if self._progress is None:
            return
        self._progress.add(steps)
        self._now = now or self._now
        if (now is not None or steps) and self._now is not None and self._now.status is not None:
            status, servers, evals = self._now.status, self._now.servers, self._now.evals
            self.update(self._progress.view(status, servers=servers, evals=evals, now=time.monotonic()))

    def update(self, view: RunView) -> None:
        """Show the run as it is now."""
        self._safely(lambda: self._show(view))

    def line(self, text: str) -> None:
        """Print `text` once: a milestone or an event. Also before the run has begun."""
        self._safely(lambda: self._say(text))
        if self._progress is not None:
            self._progress.last_event = text

    def close(self) -> None:
        """Leave the last panel on the screen and give the terminal back. Lines may still be written."""
        self._safely(self._stop)

    def _safely(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._broken:
                return
            try:
                action()
            except (OSError, ValueError):  # the reader of a pipe has gone, the disk behind it is full, it was closed
                self._broken = True
                discard(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, view: RunView) -> None:
        if self._console is not None:
            self._draw(self._console, view)
        elif is_worth_a_line(view, self._shown):
            self._shown = view
            self._write(render_line(view))

    def _say(self, text: str) -> None:
        if self._console is None:
            self._write(text)
        else:
            self._console.print(text, soft_wrap=True)

    def _stop(self) -> None:
        live = self._live
        self._live = None
        if live is not None:
            live.stop()

    def _draw(self, console: SafeConsole, view: RunView) -> None:
        panel = render_panel(view, console.width)
        if self._live is not None:
            self._live.update(panel, refresh=True)
            return
        # auto_refresh would draw from a second thread, at a time when nothing has changed.
        # stderr is taken over only where it is a terminal too: what goes to a file must stay in the file.
        self._live = Live(
            panel, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty(), vertical_overflow="crop"
        )
        self._live.start(refresh=True)  # from here on sys.stdout obeys colours and links; `stop` gives it back
        sys.stdout = visible_on(sys.stdout)
        if sys.stderr.isatty():
            sys.stderr = visible_on(sys.stderr)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def is_worth_a_line(view: RunView, last: RunView | None) -> bool:
    """Whether a log wants a line for `view`, `last` being the view that had one before."""
    if last is None:
        return True
    since = view.elapsed_s - last.elapsed_s
    if view.steps_done == last.steps_done:
        return since >= HEARTBEAT_S
    return since >= LINE_EVERY_S or view.steps_done == view.status.total_steps


def _is_live(stream: TextIO) -> bool:
    """A terminal that can move its cursor and show our characters."""
    is_utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return is_utf8 and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class FollowedRun:
    """What its files say from now on, each once."""

    def __init__(self, paths: RunPaths, attempt: int | None = None) -> None:
        """`attempt`: whose events and status; None: of every attempt. Steps are those that anybody writes: a trainer
        that begins may complete the last one of the attempt before."""
        self._paths = paths
        self._attempt = attempt
        self._events = EventTail(paths.events, attempt)
        self._steps = EventTail(paths.metrics)
        self._beat = (-1, -1)

    def new_events(self, unwritten: Sequence[Record] = ()) -> list[Record]:
        """`unwritten`: as of EventTail."""
        return self._events.new_events(unwritten)

    def new_steps(self) -> list[Record]:
        return self._steps.new_events()

    def new_status(self) -> CurrentStatus | None:
        """None where nobody has written since the last time."""
        now = read_now(self._paths)
        if now is None or self._attempt not in (None, now.attempt) or (now.attempt, now.beat) == self._beat:
            return None
        self._beat = (now.attempt, now.beat)
        return now
