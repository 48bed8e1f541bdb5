"""The live display: a panel of Rich in a terminal, plain lines elsewhere. Its errors never end a run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Self, TextIO

from rich.live import Live

from launcher.reporting.run_view import RunView
from launcher.reporting.terminal_panel import render_line, render_panel
from launcher.reporting.terminal_text import SafeConsole, discard, visible_on

LINE_EVERY_S = 2.0
"""At most so often a line about a step, where lines are written; the last step always has one."""
HEARTBEAT_S = 60.0
"""After so long without a step, a line reports what the run is waiting for."""


class Display:
    """Shows views as they come. `line` prints something once, above the panel. Safe to call from several threads.

    In a terminal, what others print (Ray forwards its workers' output) scrolls by above the panel. A stream that
    breaks, such as a pipe to `head`, silences the display and nothing else.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = visible_on(stream)
        self._lock = threading.RLock()
        self._broken = False
        self._shown: RunView | None = None  # the last view that got a line of its own
        self._live: Live | None = None
        self._console = SafeConsole(stream) if _is_live(stream) else None

    def update(self, view: RunView) -> None:
        """Show the run as it is now."""
        self._safely(lambda: self._show(view))

    def line(self, text: str) -> None:
        """Print `text`: a milestone or an event."""
        self._safely(lambda: self._say(text))

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
        live, self._live = self._live, None
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
