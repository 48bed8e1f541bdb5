"""P12: a restore that changed nothing is undone, and the run ends for a person."""

import dataclasses

from launcher.base.messages import Cause, Incident, TerminalStatus
from launcher.policy.actions import Halt, PauseTrainer, ReinstateCheckpoints
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.restart_budget import RepairAttempt, Rung
from tests.support.simulated_run.looks import PAUSED, decide, kinds, observed, server, trainer

OUTSIDE = Incident(cause=Cause.OUTSIDE_WEIGHTS, subject="environment", reason="0.01, and earned 0.86", since=990.0)
RESTORED = RepairAttempt(
    at=900.0, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=45, restored_step=19
)


def saved(step):
    return CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE)


def test_a_restore_that_changed_nothing_is_undone_and_the_run_ends_for_a_person():
    there = {"next_step": 20, "policy_version": 20}
    current = server(weight_version=20)
    running = observed(current, trainer=trainer(**there), incident=OUTSIDE)
    assert kinds(decide(running, [RESTORED])) == [PauseTrainer]

    paused = dataclasses.replace(running, trainer=dataclasses.replace(PAUSED, **there), checkpoints=(saved(19),))
    undoing = decide(paused, [RESTORED])
    assert undoing.actions == (ReinstateCheckpoints(after_step=19, reason=OUTSIDE.reason),)
    assert decide(paused, [RESTORED, *undoing.attempts]).actions == (), "it failed: not again at once"

    put_back = dataclasses.replace(paused, checkpoints=(saved(19), saved(39), saved(46)))
    (halt,) = decide(put_back, [RESTORED, *undoing.attempts]).actions
    assert isinstance(halt, Halt) and halt.word is TerminalStatus.ERRORED
    assert "what the last restore set aside is back, and the same command resumes from the newest" in halt.reason
    assert "condemned" not in halt.reason, "of two restores in a row what the first set aside stays where it is"


def test_what_could_not_be_put_back_is_not_said_to_be_back():
    tried = [
        RepairAttempt(at=100.0 + n, cause=Cause.OUTSIDE_WEIGHTS, subject="trainer", rung=Rung.RETRY) for n in range(3)
    ]
    paused = observed(trainer=dataclasses.replace(PAUSED, next_step=20), incident=OUTSIDE)
    paused = dataclasses.replace(paused, checkpoints=(saved(19),))
    (halt,) = decide(paused, [dataclasses.replace(RESTORED, at=99.0), *tried]).actions
    assert isinstance(halt, Halt) and "set aside after step 19 could not be put back" in halt.reason
    assert "stays condemned" not in halt.reason


def test_an_attempt_that_restored_nothing_has_nothing_to_undo():
    paused = observed(trainer=PAUSED, incident=OUTSIDE)
    assert kinds(decide(paused)) == [Halt]


def test_what_another_failure_restored_or_a_collapse_restored_elsewhere_is_not_undone():
    paused = observed(trainer=dataclasses.replace(PAUSED, next_step=20), incident=OUTSIDE)
    paused = dataclasses.replace(paused, checkpoints=(saved(19),))
    history = [dataclasses.replace(RESTORED, restored_step=9), dataclasses.replace(RESTORED, cause=Cause.NONFINITE)]
    (halt,) = decide(paused, history).actions
    assert isinstance(halt, Halt) and "no checkpoint stays condemned for it" in halt.reason
