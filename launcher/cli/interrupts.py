"""Handles SIGINT and SIGTERM: the first asks the run to save and end, the second ends it at once. SIGHUP, of a terminal
that is closed, asks too, however often. SIGUSR1 is a notice that the machine is taken away (launcher/cli/deadlines.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Self

NOTICE = signal.SIGUSR1
SIGNALS = (signal.SIGINT, signal.SIGTERM, NOTICE)
HEARD = (*SIGNALS, signal.SIGHUP)
EARLY = b"stopping: the run ends when Ray has started, or has failed to; a second signal ends it at once\n"
"""Said at once, as nobody looks whether `asked` meanwhile."""


class Interrupts:
    """A context manager around whatever may be interrupted. `asked` turns true at the first signal; `notified_at` is
    when the first notice came (monotonic), None before. While `ends_at_once`, the first ends it already: nothing has
    begun that could be saved. `keeper`: the parent, with whose end the kernel sends the first (launcher/cli/keeper.py);
    None: there is none."""

    def __init__(self, *, ends_at_once: bool = False, keeper: int | None = None) -> None:
        self._count = 0
        self._keeper = keeper
        self.ends_at_once = ends_at_once
        self.notified_at: float | None = None
        self._is_early = False
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def asked(self) -> bool:
        return self._count > 0

    @property
    def reason(self) -> str:
        """Who `asked`."""
        is_orphan = self._keeper is not None and os.getppid() != self._keeper
        return "the command's own process was killed" if is_orphan else "ended by the user"

    def __enter__(self) -> Self:
        for number in HEARD:
            if not is_switched_off(number):
                self._previous[number] = signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        return self

    @staticmethod
    def hold_back_notice() -> None:
        """It would end a process that does not listen yet. To be called before there are other threads."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})

    def spare_children(self) -> None:
        """What is started before `listen_again` hears no SIGHUP: the kernel sends it to all that a terminal started,
        Ray's processes too, and a run without them can't be saved."""
        self._is_early = True
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    def listen_again(self) -> None:
        """After somebody else has put a handler of their own in place, as `ray.init` does for SIGTERM."""
        self._is_early = False
        for number in HEARD:
            if not is_switched_off(number):
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == NOTICE:
            self.notified_at = self.notified_at or time.monotonic()
            return
        if number == signal.SIGHUP:  # the shell and the kernel may both send one
            self._count = max(self._count, 1)
        else:
            self._count += 1
        if self.ends_at_once:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            return
        if self._count == 1 and self._is_early:
            with contextlib.suppress(OSError):  # a terminal that is gone
                os.write(2, EARLY)
        if self._count > 1:
            raise KeyboardInterrupt


def is_switched_off(number: int) -> bool:
    """As by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class NoInterrupts(Interrupts):
    """Of a driver that no signal reaches: it is asked by the run's file of requests
    (launcher/run_files/control_requests.py)."""

    def __enter__(self) -> Self:
        return self

    def spare_children(self) -> None:
        pass

    def listen_again(self) -> None:
        pass
