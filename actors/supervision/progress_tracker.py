"""The repairs of a run, how far it has got, and with which servers: a new highest step resets the restart budgets
(launcher/policy/restart_budget.py).

That a repair was followed by progress is written down, once for each; so a Coordinator that takes over neither forgets
the repairs that have not helped yet, nor counts those that have. Nor does it count a restore that was ordered by a
Coordinator that was killed, where the order never reached the trainer or the trainer ended too: what takes its place is
not a second one, and no second collapse at the same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from actors.supervision.event_facts import attempt_of, number_of, optional_number
from launcher.base.messages import Health
from launcher.policy.observed import TrainerFacts
from launcher.policy.reconcile_trainer import TRAINER
from launcher.policy.restart_budget import RepairAttempt, restored_nothing
from launcher.run_files.line_tail import LineTail

if TYPE_CHECKING:
    from actors.supervision.run_history import RunHistory

ATTEMPT = "repair.begun"
PROVED = "repair.proved"
NOT_TRIED = "repair.not_tried"
LAST_BYTES = 256 * 1024
"""Of the metrics: some hundred steps, more than were repeated since the restore that a killed Coordinator ordered."""


def furthest_step(metrics: Path, attempt: int) -> int:
    """The step after the last that this attempt has committed, as far as the end of its metrics shows."""
    size = metrics.stat().st_size if metrics.exists() else 0
    lines = LineTail(metrics, since=max(0, size - LAST_BYTES)).read()
    steps = [line.get("global_step") for line in lines if line.get("attempt") == attempt]
    return 1 + max((step for step in steps if isinstance(step, int)), default=-1)


class RepairRecord:
    """Read from the journal. `proved`: by subject, when the run first got further after its last repair. `lineage`: how
    many restores were ordered."""

    def __init__(self) -> None:
        self.attempts: list[RepairAttempt] = []
        self.proved: dict[str, float] = {}
        self.furthest = 0
        self.lineage = 0
        self._is_restoring = False
        self._booked: RepairAttempt | None = None  # as what a restore under way counts; None: a start's load
        self._next_booked: RepairAttempt | None = None

    def take(self, event: Mapping[str, object]) -> None:
        match event.get("event"):
            case "repair.begun":
                self.attempts.append(booked := attempt_of(event))
                self._next_booked = booked if booked.restored_step is not None else None
            case "repair.proved":
                self.proved[str(event.get("subject", ""))] = number_of(event, "at")
                self.furthest = max(self.furthest, int(number_of(event, "next_step")))
            case "trainer.restoring":
                self.lineage, self._is_restoring = int(number_of(event, "lineage")), True
                self._booked = self._next_booked
                self._next_booked = None
            case "trainer.loaded" | "trainer.resuming":  # nobody has it step before what it is to step from is loaded
                self._is_restoring = False
            case "trainer.restoring_failed":
                self._is_restoring = False
                if self._booked is not None:
                    self.attempts = restored_nothing(self.attempts, optional_number(event, "global_step"))
                    self._booked = None
            case "repair.not_tried":
                self._is_restoring = False
                self.attempts = [one for one in self.attempts if one is not self._booked]
                self._booked = None

    def owes_proof(self, subject: str) -> bool:
        """It was repaired since the run last got further with its help."""
        since = self.proved.get(subject, float("-inf"))
        recent = itertools.takewhile(lambda attempt: attempt.at > since, reversed(self.attempts))
        return any(attempt.subject == subject for attempt in recent)

    def has_lost_a_restore(self, trainer: TrainerFacts) -> bool:
        """While none is under way: the last one was ordered, and the trainer holds what it held before, or has ended
        before it stepped from there."""
        is_known = trainer.is_loaded or trainer.verdict.health is Health.DEAD
        return self._is_restoring and is_known and trainer.lineage < self.lineage


class ProgressTracker:
    """`furthest`: the step after the last one that this attempt has ever committed."""

    def __init__(self, history: RunHistory, furthest: int = 0) -> None:
        self._history = history
        self._furthest = max(furthest, history.repairs.furthest)
        self._at: dict[str, float] = dict(history.repairs.proved)

    def at(self, subject: str) -> float | None:
        """When the run last got further than ever before, with the help of `subject`."""
        return self._at.get(subject)

    def note(self, next_step: int, helpers: Collection[str], now: float) -> None:
        """`helpers`: the servers whose tokens these were. The trainer has its part in every step."""
        if next_step <= self._furthest:
            return
        self._furthest = next_step
        for subject in (TRAINER, *helpers):
            if self._history.repairs.owes_proof(subject):
                self._history.proved_by(subject, next_step, now)
            self._at[subject] = now
