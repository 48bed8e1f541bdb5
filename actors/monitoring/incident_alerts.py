"""Follows the incidents in the journal, and has each told to people: once when it begins, once when it ends.

Who follows the journal needs nobody to call it, misses none while it is restarted, and tells none twice: that a
message was handed over is in the journal before it is sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from actors.monitoring.alerts import Alerts
from launcher.config.supervision import AlertsConfig
from launcher.reporting.event_lines import alert_of
from launcher.run_files.journal import Journal
from launcher.run_files.line_tail import LineTail
from launcher.run_files.run_paths import RunPaths

SENT = "alert.sent"
SOON_S = 0.05


class IncidentAlerts:
    """Of one attempt; what earlier ones left untold is no news any more."""

    def __init__(self, config: AlertsConfig, paths: RunPaths, journal: Journal, attempt: int) -> None:
        self._alerts = Alerts(config, run=f"{paths.experiment_name}/{paths.trial_name}")
        self._tail = LineTail(paths.events)
        self._journal = journal
        self._attempt = attempt
        self._sent: set[tuple[int, str]] = set()
        self._titles: dict[int, str] = {}

    def refresh(self) -> None:
        """Tell what is new."""
        events = [event for event in self._tail.read() if event.get("attempt") == self._attempt]
        for event in events:
            number, state = event.get("incident"), event.get("state")
            if event.get("event") == SENT and isinstance(number, int):
                self._sent.add((number, str(state)))
        for event in events:
            if (found := alert_of(event)) is not None:
                self._tell(event, *found)

    def wait_told(self, timeout_s: float) -> None:
        """Until every message was sent or given up, or the time is over."""
        give_up_at = time.monotonic() + timeout_s
        while self._alerts.waiting and time.monotonic() < give_up_at:
            time.sleep(SOON_S)

    def _tell(self, event: Mapping[str, object], title: str, text: str) -> None:
        number = event.get("incident")
        if not isinstance(number, int):
            return
        state = str(event["event"]).rpartition(".")[2]
        if state == "began":
            self._titles[number] = title
        if (number, state) in self._sent:
            self._alerts.known(number, self._titles.get(number, title))
            return
        self._sent.add((number, state))
        self._journal.record(SENT, subject="webhook", reason=title, incident=number, state=state)
        if state == "began":
            self._alerts.began(number, title, text)
        else:
            self._alerts.known(number, self._titles.get(number, title))
            self._alerts.ended(number, text)
