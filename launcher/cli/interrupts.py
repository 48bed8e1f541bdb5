"""Handles SIGINT and SIGTERM: the first asks the run to save and end, the second ends it at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Interrupts:
    """A context manager around whatever may be interrupted. `asked` turns true at the first signal."""

    def __init__(self) -> None:
        self._count = 0
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def asked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def listen_again(self) -> None:
        """After somebody else has put a handler of their own in place, as `ray.init` does for SIGTERM."""
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


class NoInterrupts(Interrupts):
    """Of a driver that no signal reaches: it is asked by the run's file of requests
    (launcher/run_files/control_requests.py).
    """

    def __enter__(self) -> Self:
        return self
