"""A server with a stopped process is condemned within two seconds; a short stop and a slow server are no alarm."""

import dataclasses
import random

import pytest

from launcher.base.messages import Health
from launcher.config.supervision import HealthConfig
from launcher.policy import observation_history
from launcher.policy.observation_history import ProcessLook, ServerEvidence, ServerLook, Task
from tests.support.simulated_run.watched_server import Interval, WatchedServer

SETTINGS = HealthConfig()
AT = 20.0
STOP_FOUND_WITHIN_S = 2.0


def stopped_server(seed, lasts_s):
    """Some of its processes, at some moment, busy or idle or loading, fast or slow; and when they were stopped."""
    draw = random.Random(seed)
    at = draw.uniform(4, 6)
    roles = draw.sample(("http", "scheduler", "detokenizer"), draw.randint(1, 3))
    server = WatchedServer(
        stopped=dict.fromkeys(roles, Interval(at, at + lasts_s)),
        waiting=Interval(0, draw.choice([3.0, at, 1e9])),
        loading=draw.choice([Interval(1e9), Interval(at - 1, at + 9)]),
        answer_s=draw.choice([0.05, 0.2, 0.8]),
        tokens_per_s=draw.choice([4.0, 40.0, 400.0]),
        tokens_seen=draw.random() < 0.8,
    )
    return server, at


def test_of_three_hundred_stops_each_is_condemned_within_two_seconds():
    delays_s = []
    for seed in range(300):
        server, at = stopped_server(seed, lasts_s=1e9)
        delays_s.append(min(t - at for t, v in server.watch(at + 3) if v.health is Health.DEAD))
    assert SETTINGS.stopped_s <= min(delays_s)
    assert max(delays_s) <= STOP_FOUND_WITHIN_S


def test_of_three_hundred_that_are_continued_within_a_second_none_is_suspected():
    for seed in range(300):
        server, at = stopped_server(seed, lasts_s=1.0)
        assert {v.health for _, v in server.watch(at + 4)} <= {Health.HEALTHY, Health.UNKNOWN}, seed


@pytest.mark.parametrize("ran", [{"cpu_s": 5.01}, {"switches": 9}])
def test_one_that_is_met_stopped_at_every_look_but_ran_between_them_is_slow(ran):
    at_first = ProcessLook(state="T", cpu_s=5.0, switches=7)
    evidence = ServerEvidence(look=ServerLook(at=0.0, processes={"scheduler": at_first}))
    for look in range(1, 100):
        process = dataclasses.replace(at_first, **ran) if look % 2 else at_first
        evidence = observation_history.observe(
            evidence, ServerLook(at=look / 20, processes={"scheduler": process}), SETTINGS
        )
        assert evidence.stopped_s == 0.0


def test_who_stops_one_on_purpose_can_ask_for_patience():
    patient = HealthConfig(stopped_s=60.0, silence_s=60.0, proof_s=60.0)
    server = WatchedServer(settings=patient, stopped={"scheduler": Interval(AT, AT + 50)})
    assert {v.health for _, v in server.watch(AT + 60)} <= {Health.HEALTHY, Health.UNKNOWN}


def test_without_believing_a_stop_it_would_be_found_too_late():
    blind = HealthConfig(stopped_s=1e9)
    server = WatchedServer(settings=blind, stopped={"http": Interval(AT)})
    assert {v.health for t, v in server.watch(AT + STOP_FOUND_WITHIN_S)} <= {Health.HEALTHY, Health.UNKNOWN}


# ── what one more look adds ──

BEFORE = ServerLook(
    at=10.0,
    processes={"scheduler": ProcessLook(state="S", cpu_s=5.0), "http": ProcessLook(state="S", cpu_s=1.0)},
    probe_waits=True,
    answered_at=9.0,
    waiting=2,
    tokens=100,
)
HELD = {"stopped_s": 1.0, "frozen_s": 2.0, "unanswered_s": 3.0, "dry_s": 4.0, "barren_s": 5.0, "token_at": 8.0}
HALF = dataclasses.replace(SETTINGS, look_interval_s=0.5)
LOADING = Task(name="loading weights", since=9.0, deadline_s=9.0)
ENDED = {"stopped_s": 0.0, "frozen_s": 0.0, "unanswered_s": 0.0, "dry_s": 0.0, "barren_s": 0.0, "token_at": 8.0}
OWED = ENDED | {"frozen_s": 2.75, "unanswered_s": 3.75, "dry_s": 4.75, "barren_s": 5.75}
WAITED = ENDED | {"frozen_s": 2.0, "unanswered_s": 3.0, "dry_s": 4.0, "barren_s": 5.0}


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        ({}, {}, OWED),
        ({}, {"waiting": 1}, OWED),
        ({}, {"waiting": 0}, OWED | {"dry_s": 0.0}),
        ({}, {"waiting": 0, "probe_waits": False}, ENDED),
        ({}, {"probe_waits": False}, OWED | {"unanswered_s": 0.0, "barren_s": 0.0}),
        ({}, {"answered_at": 10.5}, OWED | {"unanswered_s": 0.0, "barren_s": 0.0}),
        ({}, {"tokens": 101}, ENDED | {"unanswered_s": 3.75, "token_at": 10.75}),
        ({}, {"tokens": 101, "waiting": 0}, ENDED | {"unanswered_s": 3.75, "token_at": 10.75}),
        ({}, {"tokens": None}, OWED | {"dry_s": 0.0, "barren_s": 0.0}),
        ({"tokens": None}, {}, OWED | {"dry_s": 0.0, "barren_s": 0.0}),
        ({"tokens": None}, {"waiting": 0}, OWED | {"dry_s": 0.0, "barren_s": 0.0}),
        ({}, {"task": LOADING}, ENDED),
        ({"task": LOADING}, {}, ENDED),
        # two intervals at most
        ({}, {"at": 15.0}, ENDED | {"frozen_s": 3.0, "unanswered_s": 4.0, "dry_s": 5.0, "barren_s": 6.0}),
        ({}, {"at": 9.0}, WAITED),
        ({}, {"http": ProcessLook(state="R", cpu_s=1.0)}, WAITED),
        ({}, {"http": ProcessLook(state="R", cpu_s=1.01)}, OWED),
        ({}, {"http": ProcessLook(state="S", cpu_s=1.01)}, OWED),
        ({}, {"scheduler": ProcessLook(state="S", cpu_s=5.01)}, OWED | {"frozen_s": 0.0}),
        ({"processes": None}, {}, OWED | {"frozen_s": 0.0}),
        ({}, {"processes": None}, OWED | {"frozen_s": 0.0}),
        ({"processes": None}, {"http": ProcessLook(state="T", cpu_s=1.0)}, OWED | {"frozen_s": 0.0}),
        ({"http": ProcessLook(state="T", cpu_s=1.0)}, {"http": ProcessLook(state="S", cpu_s=1.0)}, OWED),
        (
            {"http": ProcessLook(state="T", cpu_s=1.0)},
            {"http": ProcessLook(state="T", cpu_s=1.0)},
            OWED | {"stopped_s": 1.75},
        ),
        (
            {"http": ProcessLook(state="T", cpu_s=1.0), "scheduler": ProcessLook(state="S", cpu_s=5.0)},
            {"http": ProcessLook(state="T", cpu_s=1.0), "scheduler": ProcessLook(state="R", cpu_s=5.0)},
            WAITED | {"stopped_s": 1.75},
        ),
    ],
)
def test_what_one_more_look_adds(before, after, held):
    evidence = ServerEvidence(look=look(before), **HELD)
    found = observation_history.observe(evidence, look({"at": 10.75} | after), HALF)
    assert {name: getattr(found, name) for name in HELD} == held


def look(change):
    of_processes = {name: value for name, value in change.items() if name in BEFORE.processes}
    processes = dict(BEFORE.processes) | of_processes
    return dataclasses.replace(
        BEFORE, **{"processes": processes} | {k: change[k] for k in change.keys() - of_processes}
    )


def test_the_newest_of_its_tokens_is_its_proof():
    proofs = [(9.0, 8.0), (8.0, 9.0), (9.0, None), (None, 9.0)]
    looks = [(ServerLook(at=10.0, processes=None, answered_at=answered), token) for answered, token in proofs]
    assert [ServerEvidence(look=one, token_at=token).proof_at for one, token in looks] == [9.0] * 4
    assert ServerEvidence(look=ServerLook(at=10.0, processes=None)).proof_at is None


def test_one_stopped_process_is_a_stopped_server():
    assert look({"http": ProcessLook(state="T", cpu_s=1.0)}).has_stopped
    assert not BEFORE.has_stopped
    assert not look({"processes": None}).has_stopped
