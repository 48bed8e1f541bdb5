"""Failures that the step loop found and that are no fault of its process: since when, and whether it may continue.

Numbers that are not finite stay a failure until the trainer is restored; a reward function that did not answer, until
it does.
"""

from __future__ import annotations

from launcher.base.messages import Cause, Incident, LoopFailure
from launcher.policy.exit_cause import ExitFinding, find_trainer_cause

NOT_OF_THE_PROCESS = frozenset({Cause.NONFINITE, Cause.VERIFIER_BROKEN})
OF_THE_REWARD = frozenset({"RewardError", "RewardImportError"})
QUOTES_OTHERS = OF_THE_REWARD | {"RolloutError"}
"""Their messages say what a server or a reward function said: memory that ran out there is not the trainer's."""


class TrainerFault:
    """Of one trainer over all its incarnations."""

    def __init__(self) -> None:
        self._failed_since: float | None = None
        self._failed_before: tuple[Cause, int] | None = None
        self._first_failed_at = 0.0
        self._answered: tuple[Cause, int] | None = None

    def incident(self, failure: LoopFailure | None, now: float) -> Incident | None:
        cause = cause_of(failure)
        if failure is None or cause not in NOT_OF_THE_PROCESS or (cause, failure.global_step) == self._answered:
            self._failed_since = None
            return None
        if self._failed_since is None:
            again = (cause, failure.global_step) == self._failed_before
            self._failed_since = self._first_failed_at if again else now
            self._failed_before, self._first_failed_at = (cause, failure.global_step), self._failed_since
        return Incident(
            cause=cause,
            subject="trainer" if cause is Cause.NONFINITE else "reward",
            reason=failure.message,
            since=self._failed_since,
            onset_step=failure.global_step,
        )

    def reward_answers(self, failure: LoopFailure | None) -> None:
        """The step that failed for want of a reward may be tried again.

        If it fails again, that counts from the first time: a function that can't score one prompt is broken too.
        """
        if failure is not None and cause_of(failure) is Cause.VERIFIER_BROKEN:
            self._answered = (Cause.VERIFIER_BROKEN, failure.global_step)

    def resumed(self) -> None:
        """What fails from now on is another failure."""
        self._answered = None


def cause_of(failure: LoopFailure | None) -> Cause | None:
    if failure is None:
        return None
    return Cause.VERIFIER_BROKEN if failure.kind in OF_THE_REWARD else finding_of(failure).cause


def finding_of(failure: LoopFailure) -> ExitFinding:
    """What the loop's error says of the trainer itself."""
    is_own = failure.kind not in QUOTES_OTHERS
    said = [f"{failure.kind}: {failure.message}".replace("\n", " ")] if is_own else []
    return find_trainer_cause(said, None)
