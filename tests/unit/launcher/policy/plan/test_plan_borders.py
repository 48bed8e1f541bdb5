"""Where one repair ends and the next begins: what is under way, spent, not loaded or another's is left alone."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.policy.actions import (
    AbandonServer,
    Halt,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
)
from launcher.policy.exit_cause import RanOut
from launcher.policy.observed import holds_damage, is_unschedulable
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    BOTH_SPENT,
    COLLAPSE,
    CONFIG,
    CORRUPT,
    CRASHED,
    NOW,
    PAUSED,
    SHELF,
    SPENT,
    T_CRASHED,
    T_OUT_OF_MEMORY,
    attempts,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)

RESTORING = (RestoreTrainer(global_step=19, reason="fell"),)
RESTARTING = (RestartTrainer(reason="exited with 1"),)
EMPTY = trainer(is_loaded=False, is_paused=True)


def of_trainer(*rungs, cause=Cause.TRAINER_CRASH):
    return attempts(*rungs, cause=cause, subject="trainer")


# ── servers ──


def test_a_server_that_lives_has_a_place_whatever_was_said_before():
    lives = server(0, unschedulable_since=NOW - 10_000)
    assert not is_unschedulable(lives)
    assert decide(observed(lives)).actions == ()


@pytest.mark.parametrize(
    ("servers", "under_way", "history"),
    [
        ((dead(0), server(1)), (RestartServer(name="s0", reason=""),), attempts(*SPENT)),  # its last one is under way
        ((server(0), server(1, ServerState.STOPPED, CRASHED)), (), ()),
        ((dead(0), dead(1)), (RestartServer(name="s1", reason=""),), BOTH_SPENT),  # the other may yet do the work
    ],
)
def test_what_is_under_way_or_stopped_is_left_alone(servers, under_way, history):
    assert decide(observed(*servers, under_way=under_way), history).actions == ()


def test_a_verdict_that_is_no_more_than_unknown_repairs_nothing():
    doubted = Verdict(health=Health.UNKNOWN, reason="not looked at for 20 s", cause=Cause.SERVER_CORRUPT)
    assert decide(observed(server(0, verdict=doubted), server(1))).actions == ()


def test_one_that_is_beyond_repair_is_given_up_as_soon_as_any_other_serves():
    for others in ((server(1), fresh(2, ServerState.STARTING)), (server(1),)):
        assert kinds(decide(observed(dead(0), *others), BOTH_SPENT)) == [AbandonServer]


def test_one_that_is_beyond_repair_is_kept_until_another_serves_that_stays():
    """It still answers itself, with weights that are doubted; or who serves is to leave."""
    doubted, starts = server(0, verdict=CORRUPT), fresh(2, ServerState.STARTING)
    spent = attempts(*SPENT, *[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.SERVER_CORRUPT)
    assert kinds(decide(observed(doubted, server(1), starts), spent)) == [AbandonServer]
    assert decide(observed(doubted, starts), spent).actions == ()
    leaving = observed(dead(0), server(1), starts, fleet=("s0", "s2"))
    assert decide(leaving, BOTH_SPENT).actions == ()


def test_weights_are_nobody_s_while_the_trainer_has_no_place_or_holds_damage():
    lost = trainer(verdict=T_CRASHED, unschedulable_since=NOW - 10)
    assert decide(observed(server(0, weight_version=40), server(1), trainer=lost)).actions == ()
    damaged = decide(observed(fresh(0), server(1), incident=COLLAPSE))
    assert kinds(damaged) == [PauseTrainer]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (observed(server(0, ServerState.STALE), server(1)), "s0 holds the current weights"),
        (observed(server(0, weight_version=40), server(1)), "s0 gets version 41"),
        (observed(hold_reason="look first"), "look first"),
        (observed(dead(0), server(1)), "exited with -9; server_crash of s0: server, 1 of 3"),
    ],
)
def test_a_plan_says_why(seen, reason):
    assert decide(seen).reason == reason


# ── the trainer ──


def test_a_trainer_that_lives_has_a_place_whatever_was_said_before():
    assert decide(observed(trainer=trainer(unschedulable_since=NOW - 10_000))).actions == ()


def test_weights_that_are_not_loaded_hold_no_damage():
    assert holds_damage(COLLAPSE, trainer())
    assert not holds_damage(COLLAPSE, trainer(is_loaded=False))
    assert not holds_damage(None, trainer())
    first = COLLAPSE.onset_step - 1
    assert [holds_damage(COLLAPSE, trainer(next_step=step)) for step in (first, first + 1)] == [False, True]


@pytest.mark.parametrize("under_way", [RESTORING, RESTARTING], ids=["restore", "restart"])
def test_its_last_repair_is_waited_for(under_way):
    spent = of_trainer(*[Rung.RESTORE] * CONFIG.restart.restore)
    assert decide(observed(trainer=trainer(verdict=T_CRASHED), under_way=under_way), spent).actions == ()
    assert decide(observed(trainer=PAUSED, incident=COLLAPSE, under_way=under_way)).actions == ()


def test_a_death_without_a_cause_counts_as_a_crash():
    gone = Verdict(health=Health.DEAD, reason="gone")
    made = decide(observed(trainer=trainer(verdict=gone)))
    assert [attempt.cause for attempt in made.attempts] == [Cause.TRAINER_CRASH]
    assert made.actions[0].reason == "gone; trainer_crash of trainer: restore, 1 of 3"


def test_each_rung_of_memory_is_another_repair_that_neither_waits_nor_is_counted_out():
    lost = trainer(verdict=T_OUT_OF_MEMORY, ran_out=RanOut.TRAINER_DEVICE)
    for rungs in (1, CONFIG.restart.restore):
        history = of_trainer(*[Rung.RESTORE] * rungs, cause=Cause.TRAINER_OOM)
        made = decide(observed(trainer=lost), history, now=history[-1].at)
        assert kinds(made) == [RestartTrainer]
        assert made.actions[0].overrides
        assert "max_tokens_per_mb" in made.actions[0].reason


def test_a_fresh_trainer_without_any_checkpoint_to_load_ends_the_run():
    corrupt = of_trainer(
        *[Rung.RESTORE] * CONFIG.restart.restore, *[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.CHECKPOINT_CORRUPT
    )
    spent = decide(observed(trainer=EMPTY), corrupt)
    assert kinds(spent) == [Halt]
    said = "the trainer's state could not be loaded (retry 3 times, restore 3 times); the checkpoint of step 39 is"
    assert spent.actions[0].reason.startswith(said), "nothing was found damaged"


def test_a_collapse_whose_restores_are_spent_ends_the_run():
    history = of_trainer(*[Rung.RESTORE] * CONFIG.restart.restore, cause=Cause.REWARD_COLLAPSE)
    made = decide(observed(trainer=PAUSED, incident=COLLAPSE), history)
    assert kinds(made) == [Halt]
    assert "restore 3 times" in made.actions[0].reason


@pytest.mark.parametrize(("newest", "condemns"), [(33, False), (34, True), (35, True)])
def test_what_is_condemned_begins_with_the_first_damaged_checkpoint(newest, condemns):
    shelf = (*SHELF[:2], dataclasses.replace(SHELF[2], global_step=newest))
    seen = dataclasses.replace(observed(trainer=PAUSED, incident=COLLAPSE), checkpoints=shelf)
    (restore,) = decide(seen).actions
    assert restore.condemn_after == (33 if condemns else None)


@pytest.mark.parametrize("fresh_or_damaged", [{"trainer": EMPTY}, {"trainer": PAUSED, "incident": COLLAPSE}])
def test_a_plan_that_restores_asks_for_the_checkpoints_and_orders_no_restore_without(fresh_or_damaged):
    seen = dataclasses.replace(observed(dead(), **fresh_or_damaged), checkpoints=None)
    made = decide(seen)
    assert (made.needs_checkpoints, kinds(made)) == (True, [RestartServer])
    assert "the checkpoints must be read first" in made.reason
    made = decide(dataclasses.replace(seen, checkpoints=SHELF))
    assert not made.needs_checkpoints
    assert RestoreTrainer in kinds(made)
