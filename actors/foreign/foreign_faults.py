"""Why another project's trainer has ended, or has to be, and what is done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.serving.server_log_tail import decisive_lines, tail
from launcher.base.errors import RunError
from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestartConfig
from launcher.policy.exit_cause import find_trainer_cause
from launcher.policy.incident_policy import Trouble
from launcher.policy.restart_budget import Repair, RepairAttempt, Rung, next_repair

TRAINER = "trainer"
ONLY_RESTORES = frozenset({Rung.RETRY})
DOING = {
    Cause.TRAINER_CRASH: "it is restarted and resumes from its newest whole checkpoint",
    Cause.TRAINER_OOM: "it is restarted as it was; its memory settings are its own",
    Cause.TRAINER_HANG: "it is stopped, and restarted from its newest whole checkpoint",
    Cause.REWARD_COLLAPSE: "it is stopped, and restarted from a checkpoint from before it",
    Cause.NONFINITE: "it is stopped, and restarted from a checkpoint from before it",
    Cause.OUTSIDE_WEIGHTS: "the restore is undone; it is tried again after longer and longer waits, or when told to",
    Cause.VERIFIER_BROKEN: "it is stopped until trainer.reward_check passes; nothing is condemned",
}
"""What is done about each cause, as a short text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFault:
    """Why an incarnation has ended, or has to. `incident`: where something is wrong with what it learned."""

    cause: Cause
    subject: str
    reason: str
    incident: Incident | None = None

    @property
    def onset_step(self) -> int | None:
        return None if self.incident is None else self.incident.onset_step

    @property
    def trouble(self) -> Trouble:
        return Trouble(cause=self.cause, subject=self.subject, reason=self.reason, onset_step=self.onset_step)

    def next_repair(
        self, history: Sequence[RepairAttempt], settings: RestartConfig, now: float, progress_at: float | None
    ) -> Repair:
        """A restart, or the halt."""
        return next_repair(
            *(self.cause, self.subject, history, settings), now=now, progress_at=progress_at, without=ONLY_RESTORES
        )

    def attempt(self, rung: Rung, now: float, step: int) -> RepairAttempt:
        return RepairAttempt(
            at=now,
            cause=self.cause,
            subject=self.subject,
            rung=rung,
            onset_step=self.onset_step,
            restored_step=step,
        )


class OutsideWeights(RunError):
    """The weights are not what changed, so that no checkpoint is condemned (P12): by `cause`, restored ones do not earn
    what they earned (OUTSIDE_WEIGHTS), or the reward function does not pass its check (VERIFIER_BROKEN)."""

    def __init__(self, reason: str, *, onset_step: int | None, cause: Cause = Cause.OUTSIDE_WEIGHTS) -> None:
        super().__init__(
            reason,
            "repair what changed beside the weights, and start the same command again: it resumes from the newest "
            f"checkpoint from before step {onset_step}",
        )
        self.onset_step = onset_step
        self.cause = cause


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
