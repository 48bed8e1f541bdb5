"""Alerts for people: one message when an incident begins and one when it ends, to a webhook.

An alert that can't be sent must never hurt the run, so a daemon thread sends, and the run only puts into its queue. The
same news may go to WandB: the process that holds the WandB run passes it on (launcher/reporting/wandb_sink.py).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from launcher.config.supervision import AlertsConfig

MOST_QUEUED = 100
TRIES = 3
PAUSE_S = 1.0

log = logging.getLogger("alerts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`state` is "began" or "ended"; `incident` its number in the run."""

    run: str
    incident: int
    state: str
    title: str
    reason: str
    time: float

    def as_json(self) -> dict[str, object]:
        text = f"{self.run}: incident {self.incident} {self.state}: {self.title}: {self.reason}"
        return {
            "text": text,  # what chat services show
            "run": self.run,
            "incident": self.incident,
            "state": self.state,
            "title": self.title,
            "reason": self.reason,
            "time": self.time,
        }


Send = Callable[[Alert], None]
"""May raise whatever it likes, and may hang."""


class Alerts:
    """Each method returns at once and never raises. Of one incident, each kind of news is sent once."""

    def __init__(self, config: AlertsConfig, *, run: str, sends: Mapping[str, Send] | None = None) -> None:
        """`sends` by name, in place of those that the configuration names."""
        self._run = run
        self._told: dict[int, str] = {}
        self._ended: set[int] = set()
        if sends is None:
            sends = {} if config.webhook is None else {"webhook": Webhook(config.webhook, config.timeout)}
        self._sinks = [Sink(name, send) for name, send in sends.items()]

    def began(self, number: int, title: str, reason: str) -> None:
        if number not in self._told:
            self._told[number] = title
            self._put(number, "began", title, reason)

    def known(self, number: int, title: str) -> None:
        """That it began was told before, by another process."""
        self._told.setdefault(number, title)

    def ended(self, number: int, reason: str) -> None:
        """Of an incident whose begin was not told, nothing is."""
        if number in self._told and number not in self._ended:
            self._ended.add(number)
            self._put(number, "ended", self._told[number], reason)

    @property
    def waiting(self) -> int:
        """Messages that are not on their way yet, or are being sent."""
        return sum(sink.waiting for sink in self._sinks)

    @property
    def missed(self) -> int:
        """Messages that did not get through."""
        return sum(sink.missed for sink in self._sinks)

    def _put(self, number: int, state: str, title: str, reason: str) -> None:
        alert = Alert(run=self._run, incident=number, state=state, title=title, reason=reason, time=time.time())
        for sink in self._sinks:
            sink.put(alert)


class Sink:
    """One way out with its own thread and queue: one that hangs keeps only itself from hearing more."""

    def __init__(self, name: str, send: Send) -> None:
        self._name = name
        self._send = send
        self._queue: queue.Queue[Alert] = queue.Queue(MOST_QUEUED)
        self.missed = 0
        threading.Thread(target=self._work, name=f"alerts-{name}", daemon=True).start()

    def put(self, alert: Alert) -> None:
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._miss("it takes no messages any more")

    @property
    def waiting(self) -> int:
        return self._queue.unfinished_tasks

    def _work(self) -> None:
        while True:
            alert = self._queue.get()
            try:
                self._send(alert)
            except Exception as error:  # noqa: BLE001 - whatever an alert meets, it must not hurt the run
                self._miss(f"{type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _miss(self, why: str) -> None:
        self.missed += 1
        log.warning("alert.missed sink=%s reason=%r", self._name, why)


class Webhook:
    """POSTs an alert as JSON, up to TRIES times. Raises what the last try met; says the host and no more of the URL,
    which may hold a secret."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def __call__(self, alert: Alert) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                self._post(json.dumps(alert.as_json()).encode())
            except OSError as error:  # URLError and its HTTPError among them
                if attempt == TRIES:
                    raise ConnectionError(
                        f"{urlsplit(self._url).hostname}: {getattr(error, 'reason', error)}"
                    ) from None
                time.sleep(PAUSE_S)
            else:
                return

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._timeout_s):
            return
