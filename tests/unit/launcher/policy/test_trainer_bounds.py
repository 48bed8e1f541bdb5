"""The bounds of the trainer's verdict, each from both sides."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health
from launcher.config.supervision import HealthConfig
from launcher.policy.trainer_liveness import TrainerEvidence, TrainerLook, judge_trainer, observe_trainer

SETTINGS = HealthConfig()
SILENCE_S, PROOF_S = SETTINGS.trainer_silence_s, SETTINGS.proof_s
LIMIT_S = SETTINGS.trainer_min_s
LOOK = TrainerLook(at=1000.0, state="S", cpu_s=5.0, pinged_at=999.0, progress=7, median_step_s=1.0)


def judged(*, at=1000.0, look=LOOK, **evidence):
    return judge_trainer(TrainerEvidence(look=look, **evidence), SETTINGS, at)


@pytest.mark.parametrize(
    ("evidence", "health", "said"),
    [
        ({}, Health.HEALTHY, "sign of life 1.0 s ago"),
        ({"at": 1000.0 + PROOF_S - 1}, Health.HEALTHY, f"sign of life {PROOF_S:.1f} s ago"),
        ({"at": 1000.0 + PROOF_S}, Health.UNKNOWN, f"last sign of life {PROOF_S + 1:.1f} s ago"),
        ({"at": 1000.0 + PROOF_S, "progress_at": 1000.0}, Health.HEALTHY, "sign of life 10.0 s ago"),
        ({"at": 1000.1 + PROOF_S, "progress_at": 1000.0}, Health.UNKNOWN, "not looked at for 10.1 s"),
        ({"at": 998.0}, Health.HEALTHY, "sign of life 0.0 s ago"),  # clocks of two processes
        ({"stopped_s": SILENCE_S - 0.1, "unanswered_s": SILENCE_S - 0.1}, Health.HEALTHY, "sign of life"),
        ({"stopped_s": SILENCE_S}, Health.SUSPECT, "stopped for 10.0 s"),
        ({"unanswered_s": SILENCE_S}, Health.SUSPECT, "does not answer for 10.0 s"),
        ({"stopped_s": SILENCE_S, "unanswered_s": SILENCE_S}, Health.DEAD, "stopped for 10.0 s; does not answer"),
        ({"idle_s": LIMIT_S - 0.1}, Health.HEALTHY, "sign of life"),
        ({"idle_s": LIMIT_S}, Health.DEAD, "no progress for 60.0 s, more than 60 s"),
    ],
)
def test_a_verdict_at_its_bound(evidence, health, said):
    verdict = judged(**evidence)
    assert verdict.health is health
    assert verdict.reason.startswith(said)
    assert (verdict.cause is Cause.TRAINER_HANG) is (health is Health.DEAD)


def test_one_that_waits_says_for_what():
    waits = dataclasses.replace(LOOK, waits_for="a server")
    assert judged(look=waits).reason == "sign of life 1.0 s ago, waits for a server"
    assert judged().reason == "sign of life 1.0 s ago"


def test_before_its_first_answer_it_is_unknown():
    assert judged(look=dataclasses.replace(LOOK, pinged_at=None)).reason == "has not answered yet"


BEFORE = TrainerEvidence(look=LOOK, stopped_s=3.0, unanswered_s=3.0, idle_s=3.0, progress_at=900.0)


def seen(**look):
    """What the next look makes of it, a quarter of a second later."""
    return observe_trainer(BEFORE, dataclasses.replace(LOOK, **{"at": 1000.25} | look), SETTINGS)


@pytest.mark.parametrize(
    ("look", "stopped_s"),
    [
        ({"state": "T"}, 3.25),
        ({"state": "T", "cpu_s": 5.1}, 0.0),  # it ran between the looks
        ({"state": "S"}, 0.0),
        ({"state": None}, 0.0),
    ],
)
def test_stopped_is_what_used_no_time_either(look, stopped_s):
    assert seen(**look).stopped_s == stopped_s


@pytest.mark.parametrize(
    ("look", "unanswered_s"),
    [
        ({"ping_waits": True}, 3.25),
        ({"ping_waits": True, "pinged_at": 1000.1}, 0.0),
        ({"ping_waits": False}, 0.0),
    ],
)
def test_an_answer_is_owed_only_while_it_was_asked_for_and_none_came(look, unanswered_s):
    assert seen(**look).unanswered_s == unanswered_s


@pytest.mark.parametrize(
    ("look", "idle_s", "progress_at"),
    [
        ({}, 3.25, 900.0),
        ({"progress": 8}, 0.0, 1000.25),
        ({"progress": 6}, 0.0, 1000.25),
        ({"waits_for": "a server"}, 0.0, 900.0),
    ],
)
def test_idle_is_what_has_work_and_does_not_move(look, idle_s, progress_at):
    found = seen(**look)
    assert (found.idle_s, found.progress_at) == (idle_s, progress_at)


def test_a_gap_between_two_looks_counts_for_two_of_them_at_most_and_never_backwards():
    assert seen(at=1100.0).idle_s == 3.0 + 2 * SETTINGS.look_interval_s
    assert seen(at=990.0).idle_s == 3.0
