"""What now.json says of a run's health is what somebody saw: the plan's own assumptions are not in it (P11)."""

import dataclasses

import pytest

from actors.supervision.run_health import LOOK_LATE_S, NOT_JUDGED, SOUND, health_of
from actors.supervision.server_handle import SERVES
from launcher.base.messages import Cause, Health, ServerState, Verdict
from tests.support.simulated_run.looks import ALIVE, COLLAPSE, CRASHED, dead, observed, server

UNHEARD = {"is_judged": False, "monitor_silent_s": 7.2}


def seen(*servers, age_s=0.4, has_trainer=True, reasons=(), silent_s=(), **look):
    return health_of(
        observed(*servers, **look),
        age_s=age_s,
        reasons=dict(reasons),
        silent_s=dict(silent_s),
        has_trainer=has_trainer,
    )


def test_a_server_nobody_has_judged_is_not_healthy_because_the_plan_takes_it_for_serving():
    (judged,) = seen(server(verdict=ALIVE)).servers
    assert (judged.name, judged.state, judged.verdict) == ("s0", ServerState.READY, ALIVE)
    (assumed,) = seen(server(verdict=SERVES)).servers
    assert assumed.verdict == NOT_JUDGED
    (unheard,) = seen(server(verdict=SERVES), **UNHEARD).servers
    assert (unheard.verdict.health, "7 s" in unheard.verdict.reason) == (Health.UNKNOWN, True)
    (gone,) = seen(dead(), **UNHEARD).servers
    assert gone.verdict == CRASHED, "its end is known without the HealthMonitor"


def test_why_it_is_in_its_state_and_how_long_its_actor_was_asked_in_vain():
    slow = server(verdict=ALIVE, state=ServerState.SUSPECT)
    stale = dataclasses.replace(server(1, verdict=ALIVE, state=ServerState.STALE), stale_reason="it is behind")
    found = seen(slow, stale, reasons={"s0": "refused", "s1": "old"}, silent_s={"s0": 3.5}).servers
    assert [(one.reason, one.silent_s) for one in found] == [("refused", 3.5), ("it is behind", 0.0)]


@pytest.mark.parametrize(
    ("look", "rewards"),
    [
        ({}, SOUND),
        ({"incident": COLLAPSE}, Verdict(health=Health.SUSPECT, reason=COLLAPSE.reason, cause=Cause.REWARD_COLLAPSE)),
        (UNHEARD, Verdict(health=Health.UNKNOWN, reason="the HealthMonitor has not answered for 7 s")),
    ],
)
def test_the_rewards_are_judged_by_the_health_monitor_or_not_known(look, rewards):
    assert seen(**look).rewards == rewards


def test_a_look_of_long_ago_is_not_what_is_now():
    assert seen(age_s=LOOK_LATE_S).age_s == LOOK_LATE_S
    assert seen(age_s=LOOK_LATE_S + 0.1) is None


def test_the_steps_of_another_projects_command_are_judged_elsewhere():
    made = seen(has_trainer=False)
    assert (made.trainer, made.rewards, len(made.servers)) == (None, None, 1)
