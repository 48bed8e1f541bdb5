"""How far a run has got, and with which servers: a new highest step resets the restart budgets
(launcher/policy/restart_budget.py).

That a repair was followed by progress is written down, once for each; so a Coordinator that takes over neither forgets
the repairs that have not helped yet, nor counts those that have. Nor does it count a restore that was ordered by a
Coordinator that was killed, where the order never reached the trainer or the trainer ended too: what takes its place is
not a second one, and no second collapse at the same place.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from actors.supervision.run_history import RunHistory
from launcher.policy.observed import TRAINER
from launcher.run_files.journal import LineTail

LAST_BYTES = 256 * 1024
"""Of the metrics: some hundred steps, more than were repeated since the restore that a killed Coordinator ordered."""


def furthest_step(metrics: Path, attempt: int) -> int:
    """The step after the last that this attempt has committed, as far as the end of its metrics shows. Undone ones
    count, and a Coordinator that takes over has no time to read a week's steps: it is not the fold's."""
    size = metrics.stat().st_size if metrics.exists() else 0
    lines = LineTail(metrics, since=max(0, size - LAST_BYTES)).read()
    steps = [line.get("global_step") for line in lines if line.get("attempt") == attempt]
    return 1 + max((step for step in steps if isinstance(step, int)), default=-1)


class ProgressTracker:
    """`furthest`: the step after the last one that this attempt has ever committed."""

    def __init__(self, history: RunHistory, furthest: int = 0) -> None:
        self._history = history
        self._furthest = max(furthest, history.memory.furthest)
        self._at: dict[str, float] = dict(history.memory.proved)

    def at(self, subject: str) -> float | None:
        """When the run last got further than ever before, with the help of `subject`."""
        return self._at.get(subject)

    def note(self, next_step: int, helpers: Collection[str], now: float) -> None:
        """`helpers`: the servers whose tokens these were. The trainer has its part in every step."""
        if next_step <= self._furthest:
            return
        self._furthest = next_step
        for subject in (TRAINER, *helpers):
            if self._history.memory.owes_proof(subject):
                self._history.proved_by(subject, next_step, now)
            self._at[subject] = now
