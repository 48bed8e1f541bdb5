"""Which state a plan shows, when it is made again, and what it leaves alone meanwhile."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, Incident, ServerState, TerminalStatus, Verdict
from launcher.policy.actions import Halt, PauseTrainer, RestartServer, RestartTrainer, RestoreTrainer, ResumeTrainer
from launcher.policy.observed import RunState
from launcher.policy.plan import WAITS_ITSELF
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    CONFIG,
    CRASHED,
    NOW,
    PAUSED,
    SUSPECT,
    T_CRASHED,
    UNKNOWN,
    attempts,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)

LOST = Verdict(health=Health.DEAD, reason="its node is gone", cause=Cause.TRAINER_CRASH)
UNSCHEDULABLE = trainer(verdict=LOST, unschedulable_since=NOW - 10)
RESTORING = (RestoreTrainer(global_step=19, reason="fell"),)
RESTARTING = (RestartTrainer(reason="exited with 1"),)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (observed(), RunState.RUNNING),
        (observed(server(verdict=CRASHED), server(1)), RunState.REPAIRING),
        (observed(server(0), fresh(1, ServerState.STARTING)), RunState.REPAIRING),
        (observed(server(0), server(1, ServerState.SUSPECT, SUSPECT)), RunState.RUNNING),
        (observed(server(0), server(1, ServerState.STOPPED)), RunState.RUNNING),
        (observed(trainer=UNSCHEDULABLE), RunState.RESTORING),
        (observed(trainer=trainer(is_loaded=False, verdict=UNKNOWN)), RunState.RESTORING),
        (observed(trainer=PAUSED, under_way=RESTORING), RunState.RESTORING),
        (observed(trainer=PAUSED, under_way=RESTARTING), RunState.RESTORING),
        (observed(trainer=PAUSED, hold_reason="look first"), RunState.PAUSED),
        (observed(state=RunState.INITIALIZING), RunState.RUNNING),
        (observed(server(0, ServerState.SUSPECT, SUSPECT), state=RunState.INITIALIZING), RunState.INITIALIZING),
        (observed(fresh(0, ServerState.STARTING), state=RunState.INITIALIZING), RunState.INITIALIZING),
        (
            observed(
                trainer=trainer(verdict=LOST, unschedulable_since=NOW - 10, is_paused=True),
                state=RunState.INITIALIZING,
                hold_reason="look first",
            ),
            RunState.INITIALIZING,
        ),
    ],
)
def test_the_state_says_what_is_being_done(seen, state):
    assert decide(seen).state is state


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        ((server(0), server(1)), "s0, s1 serve"),
        ((server(0), server(1, ServerState.FAILED, CRASHED)), "s0 serves; s1 is FAILED"),
        ((server(0, ServerState.SUSPECT, SUSPECT),), "s0 is SUSPECT"),
    ],
)
def test_a_run_that_runs_again_says_from_which_step_and_which_servers_serve(servers, told):
    made = decide(observed(*servers, state=RunState.REPAIRING))
    assert (made.state, made.reason) == (RunState.RUNNING, f"the trainer takes step 41; {told}")


def test_what_failed_a_moment_ago_is_named_with_the_time_until_it_is_tried_again():
    made = decide(observed(dead(0), server(1), not_before={(RestartServer, "s0"): NOW + 1.5}))
    assert (made.actions, made.reason) == ((), "RestartServer s0 failed: again in 1.5 s")
    assert made.wake_at == NOW + 1.5


def test_a_server_that_was_given_up_is_no_repair_and_one_that_waits_for_its_turn_is():
    spent = attempts(*[Rung.SERVER] * CONFIG.restart.server)
    given_up = decide(observed(server(0, ServerState.FAILED, CRASHED), server(1)), spent)
    assert (given_up.actions, given_up.state) == ((), RunState.RUNNING)
    waiting = decide(observed(server(0, verdict=CRASHED), server(1)), attempts(Rung.SERVER), now=800.4)
    assert (waiting.actions, waiting.state) == ((), RunState.REPAIRING)


def test_the_plan_is_made_again_when_the_first_of_those_that_wait_is_due():
    history = [*attempts(Rung.SERVER), *attempts(Rung.SERVER, Rung.SERVER, subject="s1")]
    made = decide(observed(dead(0), dead(1)), history, now=810.5)
    assert [action.name for action in made.actions] == ["s0"]
    assert made.wake_at == 812.0
    both = decide(observed(dead(0), dead(1)), [*attempts(Rung.SERVER, Rung.SERVER), *history[1:2]], now=800.5)
    assert (both.actions, both.wake_at) == ((), 801.0)


def test_a_trainer_that_is_dead_is_not_asked_to_pause_or_resume():
    assert decide(observed(trainer=UNSCHEDULABLE, hold_reason="look first")).actions == ()
    gone = trainer(verdict=LOST, unschedulable_since=NOW - 10, is_paused=True)
    assert decide(observed(trainer=gone)).actions == ()
    assert kinds(decide(observed(trainer=trainer(verdict=T_CRASHED), hold_reason="look first"))) == [RestartTrainer]


def test_one_server_that_can_serve_is_enough_to_resume_and_one_that_is_dead_is_none():
    assert kinds(decide(observed(server(0), fresh(1, ServerState.STARTING), trainer=PAUSED))) == [ResumeTrainer]
    assert ResumeTrainer not in kinds(decide(observed(server(0, verdict=CRASHED), trainer=PAUSED)))
    assert ResumeTrainer not in kinds(decide(observed(server(0, weight_version=3), trainer=PAUSED)))


def test_the_reason_is_what_is_done_or_waited_for():
    assert decide(observed()).reason == "nothing to do"
    itself = decide(observed(trainer=dataclasses.replace(PAUSED, waits_itself=True)))
    assert (itself.actions, itself.reason) == ((), WAITS_ITSELF)
    broken = Incident(cause=Cause.VERIFIER_BROKEN, subject="reward", reason="all 0\n  → mend it", since=NOW)
    assert decide(observed(trainer=PAUSED, incident=broken)).reason == "all 0"
    assert decide(observed(trainer=PAUSED, hold_reason="look first")).reason == "look first"
    assert decide(observed(hold_reason="look first")).reason == "look first"
    assert kinds(decide(observed(hold_reason="look first"))) == [PauseTrainer]
    starting = decide(observed(server(0), fresh(1, ServerState.STARTING)))
    assert (starting.state, starting.reason) == (RunState.REPAIRING, "s1 is STARTING")


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (observed(trainer=trainer(is_finished=True)), "all steps are done"),
        (observed(trainer=trainer(is_finished=True), abort_reason="Ctrl-C"), "all steps are done"),
        (observed(abort_reason="Ctrl-C"), "Ctrl-C"),
    ],
)
def test_an_end_says_why(seen, reason):
    made = decide(seen)
    assert [action.reason for action in made.actions] == [reason]
    assert made.reason == f"{made.actions[0].word}: {reason}"


def test_an_end_whose_status_nobody_knows_is_an_error():
    halting = decide(observed(state=RunState.SHUTTING_DOWN))
    assert halting.actions == (Halt(reason="the run was being shut down", word=TerminalStatus.ERRORED),)
    assert decide(observed(state=RunState.SHUTTING_DOWN, is_stopped=True)).state is RunState.ERRORED
