"""What a plan does for a command: it needs no server to begin, and no weights of it are sent to any."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, Incident, ServerState, TerminalStatus, Verdict
from launcher.policy.actions import (
    AdmitServer,
    Halt,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.observed import RunState
from tests.support.simulated_run.looks import (
    COLLAPSE,
    T_CRASHED,
    dead,
    decide,
    kinds,
    observed,
    server,
    trainer,
)

COMMAND = trainer(is_command=True)
EMPTY = dataclasses.replace(COMMAND, is_loaded=False, is_paused=True)
RESTORED = dataclasses.replace(COMMAND, is_paused=True)
STARTING = dataclasses.replace(COMMAND, is_loaded=False, verdict=Verdict(health=Health.UNKNOWN, reason="no step yet"))
OUTSIDE = Incident(cause=Cause.OUTSIDE_WEIGHTS, subject="environment", reason="they earn 0 now", since=990.0)


def alone(command, state=RunState.RESTORING, **seen):
    """Its servers are its own."""
    return dataclasses.replace(observed(trainer=command, state=state, **seen), servers=(), fleet=())


def test_the_life_of_a_command_that_has_servers_of_its_own():
    lost = decide(alone(dataclasses.replace(COMMAND, verdict=T_CRASHED), RunState.RUNNING))
    assert kinds(lost) == [RestartTrainer]
    loading = decide(alone(EMPTY), lost.attempts)
    assert [(type(one), one.global_step) for one in loading.actions] == [(RestoreTrainer, 39)]
    assert decide(alone(RESTORED), lost.attempts).actions == (ResumeTrainer(),)
    starting = decide(alone(STARTING), lost.attempts)
    assert (starting.actions, starting.state) == ((), RunState.RESTORING)
    going = decide(alone(COMMAND), lost.attempts)
    assert (going.state, going.reason) == (RunState.RUNNING, f"the trainer takes step {COMMAND.next_step}")


def test_servers_behind_a_door_are_repaired_and_admitted_while_the_command_starts_or_is_dead():
    dead_command = dataclasses.replace(COMMAND, verdict=T_CRASHED)
    for command, others in ((STARTING, []), (dead_command, [RestartTrainer])):
        stale = server(state=ServerState.STALE)
        assert kinds(decide(observed(stale, trainer=command))) == [*others, AdmitServer]
        assert kinds(decide(observed(dead(), trainer=command))) == [*others, RestartServer]


def test_what_a_person_has_to_mend_is_told_and_the_restore_is_taken_back():
    (halt,) = decide(alone(RESTORED, incident=OUTSIDE)).actions
    assert (halt.word, halt.may_pass, halt.reinstate_after) == (TerminalStatus.ERRORED, False, RESTORED.next_step - 1)
    assert halt.reason.endswith(
        "the same command again: it resumes from the newest checkpoint from before the rewards fell"
    )


def test_how_it_is_done_is_the_reason_of_the_end():
    done = dataclasses.replace(
        COMMAND, is_finished=True, told="the command ended with exit code 0; its last step was 7"
    )
    assert decide(alone(done)).actions == (Halt(reason=done.told, word=TerminalStatus.FINISHED),)


@pytest.mark.parametrize(("every", "restored"), [(1, 19), (10, 9)])
def test_a_margin_before_an_onset_counts_reports(every, restored):
    fell = dataclasses.replace(COLLAPSE, onset_step=32)
    (restore,) = decide(alone(RESTORED, incident=fell, report_every=every)).actions
    assert restore.global_step == restored


def test_a_command_that_had_learned_is_not_sent_to_a_tool_that_knows_only_our_checkpoints():
    none = tuple(CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE) for step in (38, 39))
    fell = dataclasses.replace(COLLAPSE, had_learned=True)
    seen = dataclasses.replace(alone(RESTORED, incident=fell), checkpoints=none)
    (halt,) = decide(seen).actions
    assert "setup_recovery" not in halt.reason
    assert halt.reason.endswith("choose one by hand, and leave no later one")
