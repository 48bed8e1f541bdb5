"""The gate before each optimizer step: the HealthMonitor is asked, and while nobody answers the trainer waits (P7).

Waits for: the monitor. Unblocked by: its answer, or the stop of the loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from actors.rollout.live_rollouts import Stopped
from launcher.policy.admission import Admission, BatchReport

ASK_AGAIN_S = 0.5

log = logging.getLogger("trainer")

Ask = Callable[[BatchReport], Admission]
"""Asks the monitor, within a deadline. Raises MonitorAway."""


class MonitorAway(Exception):
    """The monitor is restarting, hangs, or is gone: there is no answer, and so no step."""


class MonitorGate:
    """`away` is told when the monitor stops answering ("…" why) and when it answers again ("")."""

    def __init__(self, ask: Ask, *, away: Callable[[str], None]) -> None:
        self._ask = ask
        self._away = away
        self._stop = threading.Event()
        self.is_waiting = False

    def __call__(self, report: BatchReport) -> Admission:
        """Raises Stopped where the loop is to stop before there is an answer."""
        self.is_waiting = True
        try:
            return self._until_answered(report)
        finally:
            self.is_waiting = False

    def _until_answered(self, report: BatchReport) -> Admission:
        was_away = False
        while True:
            try:
                admission = self._ask(report)
            except MonitorAway as error:
                if not was_away:
                    self._away(str(error))
                was_away = True
            else:
                if was_away:
                    self._away("")
                return admission
            if self._stop.wait(ASK_AGAIN_S):
                raise Stopped

    def stop(self) -> None:
        self._stop.set()

    def allow(self) -> None:
        self._stop.clear()
