"""Which halts are worth another attempt of the same command: what may pass by itself, not what would come again."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, Verdict
from launcher.policy.actions import Halt
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    BROKEN,
    CONFIG,
    CRASHED,
    NOW,
    PAUSED,
    T_CRASHED,
    T_OUT_OF_MEMORY,
    attempts,
    dead,
    decide,
    observed,
    trainer,
)

SPENT = [Rung.SERVER] * CONFIG.restart.server
BUG = "ValueError: no answer in record 17 at 0x7f00"


def halt_of(seen, history=()):
    (halt,) = decide(seen, history).actions
    assert isinstance(halt, Halt)
    return halt


def restarts_of_the_trainer(*told, cause=Cause.TRAINER_CRASH):
    made = attempts(*[Rung.RESTORE] * CONFIG.restart.restore, cause=cause, subject="trainer")
    return [dataclasses.replace(one, told=words) for one, words in zip(made, told, strict=True)]


def test_the_four_halts_that_a_person_would_only_start_again():
    assert halt_of(observed(monitor_silent_s=CONFIG.health.monitor_silence_s + 1)).may_pass
    assert halt_of(observed(door_silent_s=CONFIG.health.monitor_silence_s + 1)).may_pass
    killed = restarts_of_the_trainer("", "", "")
    assert halt_of(observed(trainer=trainer(verdict=T_CRASHED)), killed).may_pass
    server_killed = attempts(*SPENT, cause=CRASHED.cause, subject="s0")
    assert halt_of(observed(dead(0)), server_killed).may_pass


@pytest.mark.parametrize(
    ("before", "now", "may_pass"),
    [
        ((BUG, BUG, BUG), BUG, False),
        ((BUG, BUG, BUG), BUG.replace("17", "23"), False),  # numbers vary
        ((BUG, BUG, BUG), "OSError: stale file handle", True),
        ((BUG, "", BUG), BUG, True),  # once it was killed
        ((BUG, BUG, BUG), "", True),
    ],
)
def test_a_trainer_that_says_the_same_each_time_would_say_it_again(before, now, may_pass):
    seen = observed(trainer=trainer(verdict=T_CRASHED, told=now))
    assert halt_of(seen, restarts_of_the_trainer(*before)).may_pass is may_pass


@pytest.mark.parametrize(
    ("seen", "history"),
    [
        (
            observed(trainer=trainer(verdict=T_OUT_OF_MEMORY)),
            restarts_of_the_trainer("", "", "", cause=Cause.TRAINER_OOM),
        ),
        (
            observed(dead(0, verdict=Verdict(health=Health.DEAD, reason="Xid 79", cause=Cause.GPU_FAULT))),
            attempts(*[Rung.SERVER] * CONFIG.restart.server, cause=Cause.GPU_FAULT, subject="s0"),
        ),
        (observed(incident=dataclasses.replace(BROKEN, since=NOW - 1e6), trainer=PAUSED), ()),
    ],
)
def test_what_the_same_command_would_meet_again_is_final(seen, history):
    """Memory of which nothing can give way, a broken GPU, a broken reward function."""
    assert not halt_of(seen, history).may_pass


def test_one_reason_that_stays_makes_the_halt_final():
    seen = observed(dead(0), trainer=trainer(verdict=T_CRASHED, told=BUG))
    spent = [*restarts_of_the_trainer(BUG, BUG, BUG), *attempts(*SPENT, cause=CRASHED.cause, subject="s0")]
    assert not halt_of(seen, spent).may_pass


def test_what_others_said_and_what_it_said_of_another_failure_are_not_its_words():
    told = restarts_of_the_trainer(BUG, BUG, BUG)
    others = [
        dataclasses.replace(told[0], subject="s0", told="killed"),
        dataclasses.replace(told[0], cause=Cause.CHECKPOINT_CORRUPT, told="torn"),
    ]
    seen = observed(trainer=trainer(verdict=T_CRASHED, told=BUG))
    assert not halt_of(seen, [*others, *told]).may_pass
