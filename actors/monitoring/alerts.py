"""Alerts for people: one message when an incident begins and one when it ends, to a webhook.

A thread follows the journal. So nobody has to call it, no incident is missed while the monitor restarts, and none is
reported twice: `alert.sent` is in the journal before a message leaves. Whatever the thread meets costs one message at
most, never the run. WandB gets the same alerts from the process that holds the WandB run
(launcher/reporting/wandb_sink.py).
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from http.client import HTTPException
from typing import Self

from launcher.config.supervision import AlertsConfig
from launcher.reporting.event_lines import alert_of
from launcher.run_files.journal import Journal, LineTail
from launcher.run_files.run_keys import read_webhook
from launcher.run_files.run_paths import RunPaths

SENT = "alert.sent"
LOOK_S = 0.5
TRIES = 3
PAUSE_S = 1.0

log = logging.getLogger("alerts")


class IncidentAlerts:
    """Of one attempt: incidents that earlier attempts did not report are not reported any more."""

    def __init__(self, config: AlertsConfig, paths: RunPaths, journal: Journal, attempt: int) -> None:
        self._shown = config.webhook
        self._keys = paths.keys
        self._timeout_s = config.timeout
        self._run = f"{paths.experiment_name}/{paths.trial_name}"
        self._journal = journal
        self._attempt = attempt
        self._tail = LineTail(paths.events)
        self._pending: deque[Mapping[str, object]] = deque()
        self._sent: set[tuple[object, str]] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="alerts", daemon=True)
        self.missed = 0
        """Messages that did not get through."""

    @classmethod
    def begun(cls, config: AlertsConfig, paths: RunPaths, attempt: int) -> Self | None:
        """Started, with a journal that has each line on the disk before its message; None without a webhook."""
        if config.webhook is None:
            return None
        made = cls(config, paths, Journal(paths.events, attempt, time.time), attempt)
        made.start()
        return made

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Send what the journal holds by now, and stop; returns after `timeout_s` at the latest."""
        self._ending.set()
        self._thread.join(timeout_s)

    def refresh(self) -> None:
        """Send what is new in the journal. Never raises."""
        try:
            new = [event for event in self._tail.read() if event.get("attempt") == self._attempt]
            self._sent |= {(e.get("of", e.get("incident")), str(e.get("state"))) for e in new if e.get("event") == SENT}
            self._pending.extend(new)
            while self._pending:
                self._send_if_due(self._pending.popleft())
        except Exception as error:  # noqa: BLE001 - no event that it can't handle may end the alerts of all later ones
            self._miss(error)

    def _follow(self) -> None:
        while True:
            is_last = self._ending.is_set()
            self.refresh()
            if is_last and not self._pending:
                return
            self._ending.wait(LOOK_S)

    def _send_if_due(self, event: Mapping[str, object]) -> None:
        found, state = alert_of(event), str(event.get("event")).rpartition(".")[2]
        number = number if isinstance(number := event.get("incident"), int) else None
        of = event.get("monotonic") if number is None else number
        if found is None or (of, state) in self._sent:
            return
        title, reason = found
        self._sent.add((of, state))
        self._journal.record(SENT, subject="webhook", reason=title, incident=number, state=state, of=of)
        what = "" if number is None else f"incident {number} {state}: "
        message = {
            "text": f"{self._run}: {what}{title}: {reason}",  # what chat services show
            "run": self._run,
            "incident": number,
            "state": state,
            "title": title,
            "reason": reason,
            "time": time.time(),
        }
        try:
            self._post(json.dumps(message).encode())
        except OSError as error:  # URLError and its HTTPError among them
            self._miss(f"{self._shown}: {getattr(error, 'reason', error)}")
        except HTTPException as error:  # the text of an InvalidURL is the URL
            self._miss(type(error).__name__)

    def _post(self, body: bytes) -> None:
        """Up to TRIES times. Raises what the last try met."""
        request = urllib.request.Request(
            read_webhook(self._keys), data=body, headers={"Content-Type": "application/json"}
        )
        for attempt in range(1, TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s):
                    return
            except OSError:
                if attempt == TRIES:
                    raise
            time.sleep(PAUSE_S)

    def _miss(self, why: object) -> None:
        """Of the URL only what may be shown is logged."""
        self.missed += 1
        log.warning("alert.missed sink=webhook reason=%r", why)
