"""The plan while a disk can't be written: pause, repair nothing, wait; and a wait before each repeated repair."""

import dataclasses

import pytest

from launcher.base.disk_faults import DiskFault
from launcher.base.messages import Cause, Health, TerminalStatus, Verdict
from launcher.policy.actions import Halt, LoadWeights, PauseTrainer, RestartServer, RestartTrainer, RestoreTrainer
from launcher.policy.disk_health import DiskTrouble
from launcher.policy.incident_policy import OpenIncident, incident_changes
from launcher.policy.observed import RunState
from tests.support.simulated_run.looks import (
    CONFIG,
    CRASHED,
    NOW,
    PAUSED,
    T_CRASHED,
    UNKNOWN,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)

FULL = DiskTrouble(path="/run", fault=DiskFault.FULL, since=NOW - 5, first=NOW - 5, free=0, missing=2**20)
HUNG = Verdict(health=Health.DEAD, reason="no progress", cause=Cause.TRAINER_HANG)


@pytest.mark.parametrize(
    ("look", "actions", "state"),
    [
        (observed(), [PauseTrainer], RunState.PAUSED),
        (observed(trainer=PAUSED), [], RunState.PAUSED),
        (observed(under_way=(PauseTrainer(reason="x"),)), [], RunState.PAUSED),
        (observed(dead(), dead(1), trainer=PAUSED, state=RunState.REPAIRING), [], RunState.PAUSED),
        (observed(fresh(), trainer=PAUSED), [], RunState.PAUSED),
        (observed(trainer=trainer(verdict=T_CRASHED)), [], RunState.PAUSED),
        (observed(trainer=trainer(verdict=HUNG)), [], RunState.PAUSED),  # it waits for the disk, in the kernel
        (observed(trainer=trainer(is_loaded=False, verdict=UNKNOWN)), [], RunState.PAUSED),
        (observed(trainer=trainer(is_loaded=False), state=RunState.INITIALIZING), [], RunState.INITIALIZING),
        (observed(monitor_silent_s=1e6), [PauseTrainer], RunState.PAUSED),  # it may wait for the disk too
    ],
)
def test_nothing_is_repaired_and_nothing_is_counted(look, actions, state):
    made = decide(dataclasses.replace(look, disk=FULL))
    assert (kinds(made), made.state, made.attempts) == (actions, state, ())
    assert "/run: no space left" in made.reason


@pytest.mark.parametrize("look", [observed(dead(), dead(1)), observed(trainer=trainer(verdict=T_CRASHED))])
def test_without_the_look_at_the_disk_a_budget_would_be_used_up(look):
    assert decide(look).attempts


def test_a_person_who_never_comes_or_makes_too_little_room_each_time_is_not_waited_for_without_end():
    again = dataclasses.replace(FULL, first=NOW - CONFIG.disk.patience_s)
    (halt,) = decide(observed(disk=again)).actions
    assert isinstance(halt, Halt)
    assert halt.word is TerminalStatus.ERRORED
    assert "disk.patience_s" in halt.reason
    old = dataclasses.replace(again, first=again.first + 1)
    made = decide(observed(disk=old))
    assert (kinds(made), made.wake_at) == ([PauseTrainer], NOW + 1)


def test_an_abort_needs_no_disk():
    (halt,) = decide(observed(disk=FULL, abort_reason="enough")).actions
    assert isinstance(halt, Halt)
    assert halt.word is TerminalStatus.ABORTED


def test_it_is_one_incident_with_path_and_missing_bytes_and_ends_when_training_continues():
    look = observed(dead(), trainer=PAUSED, disk=FULL)
    (began,) = incident_changes([], look).begins
    assert (began.cause, began.subject, began.since) == (Cause.DISK_FULL, "disk", FULL.since)
    assert began.reason == "/run: no space left, 0.0 MiB free, 1.0 MiB missing"
    one = OpenIncident(number=1, cause=Cause.DISK_FULL, subject="disk", since=FULL.since)
    assert incident_changes([one], look) == incident_changes([one], dataclasses.replace(look, disk=FULL))
    assert not incident_changes([one], observed(trainer=PAUSED)).ends, "the trainer is still paused"
    (ended,) = incident_changes([one], observed()).ends
    assert ended.is_mended


@pytest.mark.parametrize(
    ("look", "failed"),
    [
        (observed(dead()), (RestartServer, "s0")),
        (observed(server(), fresh(1)), (LoadWeights, "s1")),
        (observed(trainer=trainer(verdict=T_CRASHED)), (RestartTrainer, "")),
        (observed(trainer=trainer(is_loaded=False, is_paused=True)), (RestoreTrainer, "")),
        (observed(hold_reason="a person"), (PauseTrainer, "")),
    ],
)
def test_what_failed_a_moment_ago_waits_and_is_not_counted(look, failed):
    assert failed[0] in kinds(decide(look))
    waits = decide(dataclasses.replace(look, not_before={failed: NOW + 3}))
    assert failed[0] not in kinds(waits)
    assert waits.attempts == ()
    assert waits.wake_at == NOW + 3
    assert failed[0] in kinds(decide(dataclasses.replace(look, not_before={failed: NOW})))


def test_a_server_that_died_while_it_was_given_weights_is_restarted_at_once():
    look = observed(dead(), server(1), not_before={(LoadWeights, "s0"): NOW + 60})
    assert kinds(decide(look)) == [RestartServer]


def test_failures_of_ever_new_causes_are_not_repaired_without_a_wait():
    """As with a full disk once: each cause had its own budget, and its first try waited for nothing."""
    history, times, now = [], [], 0.0
    causes = [Cause.SERVER_CRASH, Cause.SERVER_HANG, Cause.SERVER_OOM, Cause.NODE_LOST, Cause.DISK_FULL]
    for cause in causes:
        look = observed(dead(verdict=dataclasses.replace(CRASHED, cause=cause)), server(1))
        made = decide(look, history, now)
        if not made.attempts:
            assert made.wake_at is not None
            now = made.wake_at
            made = decide(look, history, now)
        history += made.attempts
        times.append(now)
    assert times == [0.0, 1.0, 3.0, 7.0, 15.0]


def test_a_pause_that_failed_is_tried_again_long_before_the_patience_ends():
    made = decide(observed(disk=FULL, not_before={(PauseTrainer, ""): NOW + 2.0}))
    assert (made.actions, made.wake_at) == ((), NOW + 2.0)
