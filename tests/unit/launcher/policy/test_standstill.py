"""For how long the run could take no step and waited for nobody; then another attempt begins."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, Incident, Verdict
from launcher.policy.actions import AdmitServer, Halt, ResumeTrainer
from launcher.policy.disk_health import DiskFault, DiskTrouble
from launcher.policy.standstill import StandstillClock, longest_standstill_s
from tests.support.simulated_run.looks import CONFIG, CRASHED, PAUSED, T_CRASHED, decide, observed, server, trainer

UNSERVED = observed(server(0, weight_version=3))
STANDS = observed(trainer=PAUSED)
NO_NODE = dataclasses.replace(server(0, verdict=CRASHED), unschedulable_since=1.0)
FULL = DiskTrouble(path="/run", fault=DiskFault.FULL, since=0.0, first=0.0)
SILENT_REWARD = Incident(cause=Cause.VERIFIER_BROKEN, subject="reward", reason="wrong", since=0.0)
FALL = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=0.0, onset_step=1)
GONE = Verdict(health=Health.DEAD, reason="gone", cause=Cause.TRAINER_CRASH)


def stood_s(*looks, every_s=2.0):
    clock = StandstillClock()
    return [clock.note(seen, every_s * number) for number, seen in enumerate(looks)][-1]


@pytest.mark.parametrize(
    "seen",
    [
        STANDS,
        UNSERVED,
        observed(trainer=trainer(verdict=T_CRASHED)),
        observed(trainer=trainer(verdict=GONE, is_loaded=True)),
        observed(trainer=trainer(is_loaded=False)),
        observed(trainer=PAUSED, incident=FALL),
        observed(NO_NODE, server(1, weight_version=3)),
        dataclasses.replace(STANDS, servers=()),
    ],
)
def test_time_counts_while_the_trainer_can_take_no_step(seen):
    assert stood_s(seen, seen, seen, seen) == 6.0


@pytest.mark.parametrize(
    "seen",
    [
        observed(),
        observed(trainer=PAUSED, hold_reason="a person"),
        observed(trainer=PAUSED, disk=FULL),
        observed(trainer=PAUSED, incident=SILENT_REWARD),
        observed(trainer=PAUSED, monitor_silent_s=0.1),
        observed(trainer=PAUSED, door_silent_s=0.1),
        observed(trainer=trainer(is_paused=True, waits_itself=True)),
        observed(trainer=trainer(verdict=T_CRASHED, unschedulable_since=1.0)),
        observed(NO_NODE),
    ],
)
def test_it_does_not_while_it_can_or_while_somebody_is_waited_for(seen):
    assert stood_s(seen, seen, seen, seen) == 0.0
    assert stood_s(STANDS, STANDS, seen, STANDS) == 4.0, "and begins nothing anew: a run that may go on has not yet"


def test_a_step_and_a_restore_begin_it_anew():
    later = observed(trainer=dataclasses.replace(PAUSED, next_step=PAUSED.next_step + 1))
    assert stood_s(STANDS, STANDS, STANDS, later) == 0.0
    assert stood_s(STANDS, STANDS, STANDS, later, later) == 2.0
    assert stood_s(later, later, later, STANDS) == 0.0


def test_what_nobody_looked_at_counts_little():
    """A machine that slept for a night has not stood still."""
    assert stood_s(STANDS, STANDS, every_s=30_000.0) == 5.0


def test_another_attempt_is_begun_after_twice_the_longest_start_and_says_what_was_tried():
    limit_s = longest_standstill_s(CONFIG)
    starts = (CONFIG.rollout.setup_timeout, CONFIG.health.trainer_first_s)
    assert limit_s == 2 * (max(starts) + CONFIG.restart.wait_max_s)
    failed = {(AdmitServer, "s0"): 0.0}
    seen = dataclasses.replace(STANDS, not_before=failed, under_way=(ResumeTrainer(),))
    assert not any(isinstance(one, Halt) for one in decide(dataclasses.replace(seen, standstill_s=limit_s)).actions)
    (halt,) = decide(dataclasses.replace(seen, standstill_s=limit_s + 1)).actions
    assert isinstance(halt, Halt)
    assert halt.may_pass
    assert halt.reason.startswith(f"the run could take no step for {limit_s + 1:.0f} s, more than {limit_s:.0f} s, ")
    assert halt.reason.endswith("waits for nobody; failed, or not done by then: AdmitServer s0, ResumeTrainer")
    (halt,) = decide(dataclasses.replace(STANDS, standstill_s=limit_s + 1)).actions
    assert halt.reason.endswith("waits for nobody")
