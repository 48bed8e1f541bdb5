"""Why another project's trainer has ended, or has to be, and what is done about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actors.serving.server_log_tail import decisive_lines, tail
from launcher.base.errors import RunError
from launcher.base.messages import Cause, Incident
from launcher.policy.exit_cause import find_trainer_cause

TRAINER = "trainer"
DOING = {
    Cause.TRAINER_CRASH: "it is restarted and resumes from its newest whole checkpoint",
    Cause.TRAINER_OOM: "it is restarted as it was; its memory settings are its own",
    Cause.TRAINER_HANG: "it is stopped, and restarted from its newest whole checkpoint",
    Cause.REWARD_COLLAPSE: "it is stopped, and restarted from a checkpoint from before it",
    Cause.NONFINITE: "it is stopped, and restarted from a checkpoint from before it",
}
"""What is done about each cause, as a short text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFault:
    """Why an incarnation has ended, or has to. `incident`: where something is wrong with what it learned."""

    cause: Cause
    subject: str
    reason: str
    incident: Incident | None = None


class OutsideWeights(RunError):
    """Restored weights do not earn what they earned: no checkpoint is condemned on that (P12)."""


def fault_of_end(log: Path, start: int, exit_code: int | None, why: str) -> ForeignFault:
    """As its log, from a byte on, and its exit show it. `why`: what else is known of its end."""
    found = find_trainer_cause(decisive_lines(tail(log, start)), exit_code)
    reason = f"{found.reason}; {why}" if why else found.reason
    return ForeignFault(
        cause=found.cause if found.cause in DOING else Cause.TRAINER_CRASH, subject=TRAINER, reason=reason
    )


def last_words(log: Path) -> str:
    said = decisive_lines(tail(log, 0))
    return f"{said[-1]} ({log})" if said else f"see {log}"
