"""The Coordinator's book of incidents: each begun once and ended once in the journal, with a folder for a person.

After each plan: what is seen ─► launcher/policy/incident_policy.py ─► incident.began, .joined, .ended ─► the keeper
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.supervision.incident_history import ENDED, IncidentHistory
from actors.supervision.run_history import RunHistory
from launcher.base.messages import Rejection
from launcher.policy.incident_policy import Ending, Trouble, close_book, keep_book, say_doing, subjects_of
from launcher.policy.observed import Observed, RecoveryPlan

DONE = frozenset(
    {
        "trainer.paused",
        "trainer.resumed",
        "trainer.restarted",
        "trainer.loaded",
        "checkpoint.condemned",
        "server.restarted",
        "server.abandoned",
        "server.loaded",
        "server.ready",
    }
)
"""Events that say that something was done."""


class ArtifactSink(Protocol):
    """Gathers what a person wants to see of an incident. Returns at once, and never raises."""

    def began(self, number: int, event: Mapping[str, object]) -> None: ...

    def joined(self, number: int, rejection: Rejection) -> None: ...

    def ended(self, number: int, facts: Mapping[str, object]) -> None: ...


class IncidentTracker:
    def __init__(self, history: RunHistory, keeper: ArtifactSink | None = None) -> None:
        self._history = history
        self._keeper = keeper

    @property
    def _record(self) -> IncidentHistory:
        return self._history.incidents

    def begin(self) -> None:
        """Close what earlier attempts left open, and gather again for what a killed Coordinator had begun."""
        for ending in close_book(list(self._record.left_open.values()), "the attempt ended first"):
            self._end(ending, None)
        for number in self._record.open:
            if self._keeper is not None:
                self._keeper.began(number, self._record.lines[number][0])

    def turn(self, seen: Observed, made: RecoveryPlan, rejections: Sequence[Rejection], now: float) -> None:
        record = self._record
        damaged = {step for step in self._history.damaged_checkpoints if f"checkpoint {step}" not in record.damaged}
        change = keep_book(
            list(record.open.values()), seen, attempts=made.attempts, rejections=rejections, damaged=damaged
        )
        for ending in change.ends:
            self._end(ending, now)
        for trouble in change.begins:
            self._begin(trouble, say_doing(trouble, made.actions), now)
        for rejection in rejections:
            self._join(rejection)

    def close(self, now: float) -> None:
        """The run has ended: nothing stays open."""
        for ending in close_book(list(self._record.open.values()), "the run was over first"):
            self._end(ending, now)

    def _begin(self, trouble: Trouble, doing: str, now: float) -> None:
        line = self._history.incident_began(trouble, doing, now)
        number = line.get("incident")
        if self._keeper is not None and isinstance(number, int):
            self._keeper.began(number, line)

    def _join(self, rejection: Rejection) -> None:
        """A rejected batch belongs to the incident of whoever spoilt it."""
        if rejection.id in self._record.joined:
            return
        subjects = subjects_of(rejection)
        number = max((n for n, one in self._record.open.items() if one.subject in subjects), default=None)
        if number is None:
            return
        self._history.incident_joined(number, rejection)
        if self._keeper is not None:
            self._keeper.joined(number, rejection)

    def _end(self, ending: Ending, now: float | None) -> None:
        number = ending.incident.number
        events = self._record.lines.get(number, [])
        seconds = None if now is None else max(now - ending.incident.since, 0.0)
        rejected = sum(n == number for n in self._record.joined.values())
        actions = [_say_action(event) for event in events if event.get("event") in DONE]
        line = self._history.incident_ended(ending, seconds=seconds, actions=actions, batches_rejected=rejected)
        if self._keeper is not None:
            self._keeper.ended(number, told(events, line))
        self._record.lines.pop(number, None)


def told(events: Sequence[Mapping[str, object]], ended: Mapping[str, object]) -> dict[str, object]:
    """An incident from its beginning to its end, for its folder."""
    began = next((event for event in events if event.get("event") == "incident.began"), {})
    head = ("incident", "cause", "subject", "reason", "onset_step", "doing", "global_step", "time", "attempt")
    facts: dict[str, object] = {key: began.get(key) for key in head}
    facts |= {key: ended.get(key) for key in ("is_mended", "seconds", "actions", "batches_rejected")}
    return facts | {
        "ended_at": ended.get("time"),
        "ended_because": ended.get("reason"),
        "events": [dict(event) for event in events if event.get("event") != ENDED],
    }


def _say_action(event: Mapping[str, object]) -> str:
    seconds = event.get("seconds")
    took = f" in {seconds:.1f} s" if isinstance(seconds, float) else ""
    subject = str(event.get("subject") or "")
    return f"{subject}: {event.get('event')}{took}".lstrip(": ")
