"""Standbys in a plan: when one is started, when it takes a lost server's place, and when it must not."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.config.supervision import RecoveryConfig
from launcher.policy.actions import (
    AbandonServer,
    AdmitServer,
    Halt,
    JoinServer,
    LoadWeights,
    ParkServer,
    PromoteServer,
    RestartServer,
)
from launcher.policy.incident_policy import OpenIncident, incident_changes, repair_text
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.policy.run_state import RunState
from tests.support.simulated_run.looks import (
    CONFIG,
    CORRUPT,
    CRASHED,
    NOW,
    PAUSED,
    SUSPECT,
    T_CRASHED,
    UNKNOWN,
    VERSION,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)

ONE = dataclasses.replace(CONFIG, recovery=RecoveryConfig(standby_servers=1))
HUNG = Verdict(health=Health.DEAD, reason="no token for 10 s", cause=Cause.SERVER_HANG)
PROMOTES = PromoteServer(name="s9", replaces="s0")


def parked(number=9, **how):
    return server(number, ServerState.PARKED, **how)


def look(*servers, standbys=("s9",), **how):
    return observed(*servers, standbys=frozenset(standbys), next_name="s7", **how)


@pytest.mark.parametrize("lost", [dead(0), server(0, verdict=CRASHED), server(0, verdict=HUNG)])
def test_a_parked_standby_takes_the_place_of_a_lost_server(lost):
    made = decide(look(lost, parked()), config=ONE)
    assert made.actions == (PROMOTES,)
    assert made.attempts == (), "it costs the lost server's budget nothing"


def test_the_lost_server_is_the_next_standby_and_is_restarted_on_a_budget_of_its_own():
    made = decide(look(dead(0), server(9), standbys=("s0",)), config=ONE)
    assert kinds(made) == [RestartServer]
    assert made.attempts == (RepairAttempt(at=NOW, cause=Cause.SERVER_CRASH, subject="s0", rung=Rung.STANDBY),)
    assert made.state is RunState.RUNNING, "nothing that has traffic is being repaired"


def test_while_it_is_promoted_nothing_else_is_done_for_either():
    assert decide(look(dead(0), parked(), under_way=(PROMOTES,)), config=ONE).actions == ()
    assert decide(look(dead(0), server(9), under_way=(PROMOTES,)), config=ONE).actions == ()


@pytest.mark.parametrize(
    "standby",
    [
        parked(weight_version=VERSION - 1),
        parked(lineage=3),
        server(9, ServerState.STALE),
        fresh(9, ServerState.STARTING),
        parked(verdict=SUSPECT),
        parked(verdict=CORRUPT),
        parked(verdict=HUNG),
        dead(9),
    ],
)
def test_one_that_is_old_or_in_doubt_is_not_promoted_and_the_lost_one_is_restarted_at_once(standby):
    made = decide(look(dead(0), standby), config=ONE)
    assert PromoteServer not in kinds(made)
    assert RestartServer(name="s0", reason=made.actions[0].reason) == made.actions[0]


def test_a_promotion_that_failed_does_not_delay_the_restart():
    failed = {(PromoteServer, "s9"): NOW + 1.0}
    made = decide(look(dead(0), parked(), not_before=failed), config=ONE)
    assert [(type(action), action.name) for action in made.actions] == [(RestartServer, "s0")]


def test_it_takes_the_place_of_one_whose_own_restart_is_under_way_too():
    restart = RestartServer(name="s0", reason="died")
    made = decide(look(fresh(0, ServerState.STARTING), parked(), under_way=(restart,)), config=ONE)
    assert made.actions == (PROMOTES,)


def test_two_lost_at_once_and_one_standby():
    made = decide(look(dead(0), dead(1), parked()), config=ONE)
    assert [(type(action), action.name) for action in made.actions] == [(PromoteServer, "s9"), (RestartServer, "s1")]


def test_who_leaves_is_not_replaced():
    made = decide(look(dead(0), server(1), parked(), leaving={"s0": "by order"}), config=ONE)
    assert PromoteServer not in kinds(made)


@pytest.mark.parametrize(
    "seen", [trainer(verdict=T_CRASHED), trainer(is_loaded=False, is_paused=True)], ids=["dead", "empty"]
)
def test_without_a_trainer_that_holds_weights_nobody_is_promoted(seen):
    made = decide(look(dead(0), parked(), trainer=seen), config=ONE)
    assert PromoteServer not in kinds(made)
    assert RestartServer in kinds(made)


def test_a_fresh_standby_loads_the_weights_and_is_parked_without_traffic():
    loads = decide(look(server(0), fresh(9)), config=ONE)
    assert loads.actions == (LoadWeights(name="s9", version=VERSION, lineage=0),)
    assert decide(look(server(0), server(9, ServerState.STALE)), config=ONE).actions == (ParkServer(name="s9"),)
    assert decide(look(server(0), parked()), config=ONE).actions == ()


def test_one_that_has_traffic_that_nobody_recorded_is_parked_or_promoted_again():
    """Its Coordinator was killed in between."""
    assert decide(look(server(0), server(9)), config=ONE).actions == (ParkServer(name="s9"),)
    assert decide(look(dead(0), server(9)), config=ONE).actions == (PROMOTES,)


def test_a_parked_server_that_is_to_have_traffic_is_admitted():
    assert decide(look(parked(0), standbys=())).actions == (AdmitServer(name="s0"),)


def test_the_first_is_started_when_all_servers_serve_and_not_before():
    assert decide(look(server(0), server(1), standbys=()), config=ONE).actions == (
        JoinServer(name="s7", is_standby=True),
    )
    for seen in (
        look(server(0), fresh(1, ServerState.STARTING), standbys=()),
        look(server(0), server(1, verdict=CRASHED), standbys=()),
        look(server(0), standbys=(), state=RunState.INITIALIZING, trainer=PAUSED),
        look(server(0), standbys=("s7",), joining=("s7",), under_way=(JoinServer(name="s7", is_standby=True),)),
    ):
        assert JoinServer not in kinds(decide(seen, config=ONE))
    assert JoinServer not in kinds(decide(look(server(0), standbys=())))


def test_a_join_that_failed_is_ordered_again_as_a_standbys():
    made = decide(look(server(0), standbys=("s7",), joining=("s7",)), config=ONE)
    assert made.actions == (JoinServer(name="s7", is_standby=True),)


def test_a_dead_standby_is_no_incident_and_no_repair_of_the_run():
    seen = look(server(0), dead(9))
    made = decide(seen, config=ONE)
    assert (kinds(made), made.state) == ([RestartServer], RunState.RUNNING)
    assert incident_changes([], seen).begins == ()


def test_a_standby_that_dies_again_and_again_is_given_up_and_costs_no_other_server_anything():
    spent = [
        RepairAttempt(at=NOW - 60 + n, cause=Cause.SERVER_CRASH, subject="s9", rung=Rung.STANDBY)
        for n in range(CONFIG.restart.server)
    ]
    assert kinds(decide(look(server(0), dead(9)), spent, config=ONE)) == [AbandonServer]
    again = decide(look(dead(0), server(1), dataclasses.replace(dead(9), state=ServerState.FAILED)), spent, config=ONE)
    assert [(a.subject, a.rung) for a in again.attempts] == [("s0", Rung.SERVER)]


def test_the_last_server_is_not_given_up_while_a_standby_starts():
    spent = [
        RepairAttempt(at=NOW - 500 + n, cause=Cause.SERVER_CRASH, subject="s0", rung=Rung.SERVER)
        for n in range(CONFIG.restart.server)
    ]
    waits = decide(look(dead(0), fresh(9, ServerState.STARTING)), spent, config=ONE)
    assert Halt not in kinds(waits)


def test_an_incident_that_a_promotion_ended_says_so():
    told = "s9, which stood by, has its place, 0.21 s after its end"
    open_ = [OpenIncident(number=1, cause=Cause.SERVER_CRASH, subject="s0", since=1.0)]
    seen = look(dead(0), server(9), standbys=("s0",), replaced={"s0": told})
    (ending,) = incident_changes(open_, seen).ends
    assert (ending.reason, ending.is_mended) == (told, True)
    begins = incident_changes([], look(dead(0), parked())).begins[0]
    assert repair_text(begins, (PROMOTES,)) == "s9, which stood by, takes its place"


def test_an_unknown_verdict_keeps_no_standby_from_helping():
    """The HealthMonitor may have died too; the standby is asked for a token before it gets traffic."""
    assert decide(look(dead(0), parked(verdict=UNKNOWN)), config=ONE).actions == (PROMOTES,)
