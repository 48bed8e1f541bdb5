"""P12: a restore that changed nothing is undone, and the run ends for a person."""

import dataclasses

from launcher.base.messages import Cause, Incident, TerminalStatus
from launcher.policy.actions import Halt, PauseTrainer
from launcher.policy.restart_budget import RepairAttempt, Rung
from tests.support.simulated_run.looks import PAUSED, decide, kinds, observed, server, trainer

OUTSIDE = Incident(cause=Cause.OUTSIDE_WEIGHTS, subject="environment", reason="0.01, and earned 0.86", since=990.0)
RESTORED = RepairAttempt(
    at=900.0, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=45, restored_step=19
)


def test_a_restore_that_changed_nothing_is_undone_and_the_run_ends_for_a_person():
    there = {"next_step": 20, "policy_version": 20}
    current = server(weight_version=20)
    running = observed(current, trainer=trainer(**there), incident=OUTSIDE)
    assert kinds(decide(running, [RESTORED])) == [PauseTrainer]

    paused = dataclasses.replace(running, trainer=dataclasses.replace(PAUSED, **there))
    failed_before = dataclasses.replace(RESTORED, cause=Cause.NONFINITE)
    (halt,) = decide(paused, [failed_before, RESTORED]).actions
    assert isinstance(halt, Halt)
    assert halt.word is TerminalStatus.ERRORED
    assert halt.reinstate_after == 19
    assert "resumes" not in halt.reason, "nobody knows yet whether anything is put back"
    assert "condemned" not in halt.reason, "of two restores in a row what the first set aside stays where it is"


def test_an_attempt_that_restored_nothing_has_nothing_to_undo():
    paused = observed(trainer=PAUSED, incident=OUTSIDE)
    assert kinds(decide(paused)) == [Halt]


def test_what_another_failure_restored_or_a_collapse_restored_elsewhere_is_not_undone():
    paused = observed(trainer=dataclasses.replace(PAUSED, next_step=20), incident=OUTSIDE)
    history = [dataclasses.replace(RESTORED, restored_step=9), dataclasses.replace(RESTORED, cause=Cause.NONFINITE)]
    (halt,) = decide(paused, history).actions
    assert isinstance(halt, Halt)
    assert "no checkpoint stays condemned for it" in halt.reason
    assert halt.reinstate_after is None
