"""Begins and ends the incidents of a run: each once in the journal, with a folder for a person.

After each plan: what is seen ─► launcher/policy/incident_policy.py ─► incident.began, .joined, .ended ─► artifacts
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from actors.supervision.incident_artifacts import ArtifactCollector
from actors.supervision.run_history import RunHistory
from launcher.base.messages import Rejection
from launcher.base.wording import counted
from launcher.policy.incident_policy import Ending, Trouble, end_all, incident_changes, repair_text, subjects_of
from launcher.policy.observed import Observed, RecoveryPlan
from launcher.run_files.run_memory import IncidentMemory

DONE = frozenset(
    {
        "trainer.paused",
        "trainer.resumed",
        "trainer.restarted",
        "trainer.loaded",
        "checkpoint.condemned",
        "cluster.restarted",
        "driver.restarted",
        "attempt.begun_anew",
        "server.restarted",
        "server.abandoned",
        "server.loaded",
        "server.ready",
    }
)
"""Events of actions that were carried out."""
BEGUN_ANEW = ("cluster.restarted", "driver.restarted", "attempt.begun_anew")


class IncidentTracker:
    """`artifacts` None: nothing is kept but the journal's lines."""

    def __init__(self, history: RunHistory, artifacts: ArtifactCollector | None = None) -> None:
        self._history = history
        self._artifacts = artifacts

    @property
    def _incidents(self) -> IncidentMemory:
        return self._history.incidents

    def begin(self) -> None:
        """End what earlier attempts left open, and gather again for what a killed Coordinator had begun."""
        self.ended(end_all(list(self._incidents.left_open.values()), "the attempt ended first"), None)
        for number in self._incidents.open:
            if self._artifacts is not None:
                self._artifacts.began(number, self._incidents.beginning(number))

    def turn(self, seen: Observed, made: RecoveryPlan, now: float) -> None:
        incidents = self._incidents
        damaged = {s for s in self._history.memory.damaged_checkpoints if f"checkpoint {s}" not in incidents.damaged}
        change = incident_changes([*incidents.open.values()], seen, attempts=made.attempts, damaged=damaged)
        self.ended(change.ends, now)
        for trouble in sorted(change.begins, key=lambda one: self._incidents.number_to_begin(one.subject)):
            doing = repair_text(trouble, made.actions, is_command=seen.trainer.is_command)
            self.opened(trouble, doing, now)
        for rejection in seen.rejections:
            self._join(rejection)

    def close(self, now: float) -> None:
        """The run has ended: nothing stays open."""
        self.ended(end_all(list(self._incidents.open.values()), "the run was over first"), now)

    def opened(self, trouble: Trouble, doing: str, now: float) -> None:
        """An incident begins, and its evidence is gathered."""
        line = self._history.incident_began(trouble, doing, now)
        number = line.get("incident")
        if self._artifacts is not None and isinstance(number, int):
            self._artifacts.began(number, line)

    def _join(self, rejection: Rejection) -> None:
        """A rejected batch belongs to the incident of whoever spoilt it."""
        subjects = subjects_of(rejection)
        number = max((n for n, one in self._incidents.open.items() if one.subject in subjects), default=None)
        if number is None or rejection.id in self._incidents.joined:
            return
        self._history.incident_joined(number, rejection)
        if self._artifacts is not None:
            self._artifacts.joined(number, rejection)

    def ended(self, endings: Sequence[Ending], now: float | None) -> None:
        """`now` None: when they began is not known on this clock."""
        for ending in endings:
            number = ending.incident.number
            events = self._incidents.lines.pop(number, [])
            line = self._history.incident_ended(
                dataclasses.replace(ending, reason=f"{ending.reason}{_what_was_kept(events)}"),
                seconds=None if now is None else max(now - ending.incident.since, 0.0),
                actions=[_action_text(event) for event in events if event.get("event") in DONE],
                batches_rejected=sum(n == number for n in self._incidents.joined.values()),
            )
            if self._artifacts is not None:
                self._artifacts.ended(number, incident_summary(events, line))


def _what_was_kept(events: Sequence[Mapping[str, object]]) -> str:
    """Of a lost cluster or driver, and of a halt: whether what was restored is the last committed step; "" where
    neither is known."""
    steps = {event.get("event"): event.get("global_step") for event in events}
    committed = next((steps[name] for name in BEGUN_ANEW if name in steps), None)
    restored = steps.get("trainer.loaded")
    if not isinstance(committed, int) or not isinstance(restored, int):
        return ""
    if (again := committed - restored) > 0:
        return f"; {counted(again, 'step')} {'is' if again == 1 else 'are'} repeated"
    return "; no committed step was lost"


def incident_summary(events: Sequence[Mapping[str, object]], ended: Mapping[str, object]) -> dict[str, object]:
    """An incident from its beginning to its end, for its folder."""
    began = next((event for event in events if event.get("event") == "incident.began"), {})
    head = ("incident", "cause", "subject", "reason", "onset_step", "doing", "global_step", "time", "attempt")
    facts: dict[str, object] = {key: began.get(key) for key in head}
    facts |= {key: ended.get(key) for key in ("is_mended", "seconds", "actions", "batches_rejected")}
    return facts | {
        "ended_at": ended.get("time"),
        "ended_because": ended.get("reason"),
        "events": [dict(event) for event in events if event.get("event") != "incident.ended"],
    }


def _action_text(event: Mapping[str, object]) -> str:
    seconds = event.get("seconds")
    took = f" in {seconds:.1f} s" if isinstance(seconds, float) else ""
    subject = str(event.get("subject") or "")
    return f"{subject}: {event.get('event')}{took}".lstrip(": ")
