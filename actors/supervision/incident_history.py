"""The incidents of a run, rebuilt from its events: their numbers, which are open, and what was done about each.

Numbers continue over attempts. A Coordinator that replaces a killed one reads the same events, continues its numbers
and ends what it left open.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base.messages import Cause
from launcher.policy.incident_policy import OF_LEARNING, OpenIncident

BEGAN, ENDED, JOINED = "incident.began", "incident.ended", "incident.joined"
MOST_LINES = 200
"""Kept of one incident: the first ones describe a repair that fails for ever."""
NOT_OF_ONE = frozenset({"run.initializing", "run.running", "run.abort_asked", "coordinator.adopted", "run.halted"})

Event = Mapping[str, object]


class IncidentHistory:
    """`open`, and `lines` (the events of each, until it ends), by number. `left_open`: of attempts that ended first."""

    def __init__(self) -> None:
        self.open: dict[int, OpenIncident] = {}
        self.lines: dict[int, list[Event]] = {}
        self.left_open: dict[int, OpenIncident] = {}
        self.joined: dict[str, int] = {}
        self.damaged: set[str] = set()
        self._reserved: dict[str, int] = {}
        self._last = 0

    def take(self, event: Event) -> None:
        """One event, of whatever attempt; in order."""
        number = event.get("incident")
        if not isinstance(number, int):
            return
        self._last = max(self._last, number)
        name, subject = str(event.get("event")), str(event.get("subject"))
        match name:
            case "incident.began":
                self._reserved.pop(subject, None)
                self.open[number] = _opened(number, subject, event)
                if event.get("cause") == Cause.CHECKPOINT_CORRUPT:
                    self.damaged.add(subject)
            case "incident.ended":
                for known in (self.open, self.left_open, self.lines):
                    known.pop(number, None)
            case "incident.joined":
                self.joined[str(event.get("rejection"))] = number
            case "server.died" if number not in self.open:
                self._reserved[subject] = number
        if number in self.open or number in self._reserved.values():
            kept = self.lines.setdefault(number, [])
            if len(kept) < MOST_LINES:
                kept.append(event)

    def beginning(self, number: int) -> Event:
        """How an open one began. Its first line may be a server's end, which is reported before it."""
        return next(event for event in self.lines[number] if event.get("event") == BEGAN)

    def next_attempt(self) -> None:
        """What is open now belongs to an attempt that has ended."""
        self.left_open.update(self.open)
        self.open, self._reserved = {}, {}

    def number_to_begin(self, subject: str) -> int:
        return self._reserved.get(subject, self._last + 1)

    def number_of_death(self, subject: str) -> int:
        """For an exit that is reported before anybody could look: of the open incident, or of the next one."""
        known = self._number_of(subject)
        return self.number_to_begin(subject) if known is None else known

    def number_for(self, event: str, subject: str) -> int | None:
        """Which open incident an event belongs to: its subject's own, else the trainer's, whose repair concerns all."""
        if event in NOT_OF_ONE:
            return None
        own = self._number_of(subject)
        if own is not None:
            return own
        if subject in self._reserved:
            return self._reserved[subject]
        learning = [number for number, one in self.open.items() if one.subject in OF_LEARNING]
        if learning:
            return max(learning)
        anybody = event.startswith("run.") and self.open
        return max(self.open) if anybody else None

    def _number_of(self, subject: str) -> int | None:
        return max((number for number, one in self.open.items() if one.subject == subject), default=None)


def _opened(number: int, subject: str, event: Event) -> OpenIncident:
    at = event.get("at")
    since = float(at) if isinstance(at, int | float) else 0.0
    return OpenIncident(number=number, cause=Cause(str(event.get("cause"))), subject=subject, since=since)
