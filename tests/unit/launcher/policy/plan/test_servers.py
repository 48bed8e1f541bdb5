"""What a plan does for servers: dead, stale, damaged, out of memory, or beyond repair."""

import dataclasses

import pytest

from launcher.base.messages import Cause, ServerState, TerminalStatus
from launcher.policy.actions import (
    AbandonServer,
    AdmitServer,
    Halt,
    LoadWeights,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
)
from launcher.policy.exit_cause import RanOut
from launcher.policy.observed import RunState
from launcher.policy.restart_budget import RepairAttempt, Rung
from tests.support.simulated_run.looks import (
    BOTH_SPENT,
    COLLAPSE,
    CONFIG,
    CORRUPT,
    CRASHED,
    NOW,
    OUT_OF_MEMORY,
    PAUSED,
    SPENT,
    T_CRASHED,
    UNKNOWN,
    VERSION,
    attempts,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)


def test_the_life_of_a_repair():
    """C1: dead → restarted → stale → weights → admitted; the trainer goes on with the other server."""
    seen = observed(dead(0), server(1))
    made = decide(seen)
    assert kinds(made) == [RestartServer]
    assert made.actions[0].name == "s0"
    assert made.state is RunState.REPAIRING
    assert made.attempts == (RepairAttempt(at=NOW, cause=Cause.SERVER_CRASH, subject="s0", rung=Rung.SERVER),)

    waiting = decide(observed(dead(0), server(1), under_way=made.actions, state=made.state), made.attempts)
    assert (waiting.actions, waiting.state) == ((), RunState.REPAIRING)

    starting = decide(observed(fresh(0, ServerState.STARTING), server(1), state=made.state), made.attempts)
    assert (starting.actions, starting.state) == ((), RunState.REPAIRING)

    stale = decide(observed(fresh(0), server(1), state=made.state), made.attempts)
    assert stale.actions == (LoadWeights(name="s0", version=VERSION, lineage=0),)

    loaded = decide(observed(server(0, ServerState.STALE), server(1), state=made.state), made.attempts)
    assert loaded.actions == (AdmitServer(name="s0"),)

    ready = decide(observed(server(0), server(1), state=made.state), made.attempts)
    assert (ready.actions, ready.state) == ((), RunState.RUNNING)


@pytest.mark.parametrize(
    "lost",
    [
        server(0, verdict=CRASHED),  # seen before its own actor has said so
        server(0, ServerState.DEAD, UNKNOWN, weight_version=None, lineage=None),  # and the other way round
    ],
)
def test_either_word_for_its_death_is_enough(lost):
    assert kinds(decide(observed(lost, server(1)))) == [RestartServer]


def test_all_servers_lost_at_once_is_the_same_path():
    """C7: the trainer is neither restarted nor paused; its rollouts wait."""
    made = decide(observed(dead(0), dead(1)))
    assert [action.name for action in made.actions] == ["s0", "s1"]
    assert set(kinds(made)) == {RestartServer}


def test_a_second_restart_waits_and_says_until_when():
    made = decide(observed(dead(0), server(1)), history=attempts(Rung.SERVER), now=800.4)
    assert (made.actions, made.wake_at) == ((), 801.0)
    assert "in 0.6 s" in made.reason


@pytest.mark.parametrize(
    ("servers", "history", "expected"),
    [
        ((dead(0), dead(1)), BOTH_SPENT, [Halt]),  # nobody is left
        ((dead(0), dead(1)), attempts(*SPENT), [RestartServer]),  # the other one has restarts left
        ((dead(0), server(1)), attempts(*SPENT), [AbandonServer]),  # the run goes on with the other
        ((dead(0), fresh(1, ServerState.STARTING)), attempts(*SPENT), []),  # it may yet be the other
        ((server(0, ServerState.FAILED, CRASHED), server(1)), attempts(*SPENT), []),
        ((server(0, ServerState.FAILED, CRASHED), dead(1)), BOTH_SPENT, [Halt]),
        ((dead(0),), attempts(*SPENT), [Halt]),  # it was alone
    ],
)
def test_when_restarts_of_one_server_are_spent(servers, history, expected):
    assert kinds(decide(observed(*servers), history)) == expected


def test_and_when_nothing_helps_the_run_halts_and_another_attempt_begins_everything_anew():
    """One that dies of the weights, or whose weights no restart brings right, has a checkpoint's to try then."""
    (halt,) = decide(observed(dead(0)), attempts(*SPENT)).actions
    assert halt.word is TerminalStatus.ERRORED
    assert halt.may_pass
    assert "server_crash of s0 again, without progress: server 3 times" in halt.reason
    spent = attempts(*SPENT, *[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.SERVER_CORRUPT)
    (halt,) = decide(observed(server(0, verdict=CORRUPT)), spent).actions
    assert isinstance(halt, Halt)
    assert halt.may_pass


def test_progress_of_the_server_itself_refills_its_budget():
    history = attempts(*SPENT)
    assert kinds(decide(observed(dead(0, progress_at=900.0), server(1)), history)) == [RestartServer]
    assert kinds(decide(observed(dead(0), server(1), progress_at=900.0), history)) == [AbandonServer]


def test_a_server_out_of_memory_starts_one_rung_down_however_often_it_was_tried():
    seen = observed(dead(0, OUT_OF_MEMORY, ran_out=RanOut.SERVER_DEVICE), server(1))
    made = decide(seen, attempts(*SPENT, cause=Cause.SERVER_OOM))
    assert made.actions[0].overrides == {"sglang.mem_fraction_static": 0.7}


def test_damaged_weights_are_loaded_again_then_the_server_is_restarted():
    seen = observed(server(0, verdict=CORRUPT), server(1))
    assert kinds(decide(seen)) == [LoadWeights]
    retries = attempts(*[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.SERVER_CORRUPT)
    assert kinds(decide(seen, retries)) == [RestartServer]
    loading = dataclasses.replace(seen, under_way=(LoadWeights(name="s0", version=VERSION, lineage=0),))
    assert decide(loading, retries).actions == ()


def test_a_server_that_is_alone_is_not_its_own_stand_in():
    """Its weights are damaged whatever is tried, and there is nobody else to do the work."""
    spent = SPENT + [Rung.RETRY] * CONFIG.restart.retry
    alone = decide(observed(server(0, verdict=CORRUPT)), attempts(*spent, cause=Cause.SERVER_CORRUPT))
    assert kinds(alone) == [Halt]
    beside = decide(observed(server(0, verdict=CORRUPT), server(1)), attempts(*spent, cause=Cause.SERVER_CORRUPT))
    assert kinds(beside) == [AbandonServer]


@pytest.mark.parametrize(
    "busy",
    [
        {"trainer": trainer(is_publishing=True)},
        {"trainer": trainer(verdict=T_CRASHED)},
        {"trainer": trainer(is_loaded=False, verdict=UNKNOWN)},
        {"trainer": PAUSED, "incident": COLLAPSE},
        {"under_way": (RestoreTrainer(global_step=19, reason=""),)},
        {"under_way": (RestartTrainer(reason="", overrides={}),)},
    ],
    ids=["publishing", "dead", "not loaded", "damaged", "restoring", "restarting"],
)
def test_weights_that_are_not_to_be_had_are_nobody_s_fault(busy):
    """A server without them is not restarted for it, however often they were sent; nor is one that may hold the wrong
    ones admitted, or sent them again for its log-probs."""
    spent = attempts(*[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.SERVER_STALE)
    old = [server(0, ServerState.STALE), server(0, weight_version=40), fresh(0)]
    for waiting in old:
        made = decide(observed(waiting, server(1), **busy), spent)
        assert not {RestartServer, AdmitServer, LoadWeights} & {
            type(action) for action in made.actions if getattr(action, "name", "") == "s0"
        }
    doubted = decide(observed(server(0, verdict=CORRUPT), server(1), **busy))
    assert LoadWeights not in kinds(doubted)


def test_out_of_memory_where_nothing_may_give_way():
    config = dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, give_way=False))
    made = decide(observed(dead(0, OUT_OF_MEMORY, ran_out=RanOut.SERVER_DEVICE), server(1)), config=config)
    assert [type(action) for action in made.actions] == [Halt]
    assert made.actions[0].word is TerminalStatus.ERRORED
    assert not made.actions[0].may_pass, "the same command has the same settings"
    assert made.actions[0].reason.startswith("server_oom of s0 (server_device), and nothing may give way")
    crashed = decide(observed(dead(0, CRASHED), server(1)), config=config)
    assert kinds(crashed) == [RestartServer]
