"""What the command of kills and stops reads in the files of a run. Nothing is timed."""

import pytest

from launcher.config.compose import compose
from launcher.config.supervision_checks import find_contradictions
from scripts.faults.started_run import PRESET
from scripts.health.recorded_run import RecordedRun
from scripts.lab import disturb
from scripts.lab.disturb import ARMS, ENDLESS, SAME_WORK, Found, Struck, after_kill, after_stop, measured

BEGUN = [
    {"event": "server.starting", "subject": "server-0"},
    {"event": "server.ready", "subject": "server-0", "monotonic": 1.0},
    {"event": "server.ready", "subject": "server-1", "monotonic": 1.2},
]
DIED = {"event": "server.died", "subject": "server-0", "monotonic": 10.1}
BACK = {"event": "server.ready", "subject": "server-0", "monotonic": 12.3}
OLD = {"server": "http://old", "version": 4, "is_again": False}


def is_served(events):
    view = RecordedRun()
    for event in events:
        view.take_event(event)
    return disturb.served(view, 2)


def test_a_kill_waits_until_all_servers_serve():
    assert not is_served(BEGUN[:2])
    assert is_served(BEGUN)
    assert not is_served([*BEGUN, DIED])
    assert not is_served([*BEGUN, DIED, {"event": "server.restarting", "subject": "server-0"}])
    assert is_served([*BEGUN, DIED, BACK])


def found(tokens, at=10.0, events=(*BEGUN, DIED, BACK)):
    return after_kill(at, "server-0", "http://old", events, tokens)


def test_the_first_tokens_are_those_that_go_on_with_what_the_killed_server_made():
    tokens = [
        {"monotonic": 9.9, **OLD},
        {"monotonic": 10.05, **OLD, "is_again": True},  # was on its way already
        {"monotonic": 10.1, "server": "http://other", "version": 4, "is_again": False},  # its own
    ]
    assert found(tokens) is None
    tokens.append({"monotonic": 10.5, "server": "http://other", "version": 4, "is_again": True})
    (made,) = found(tokens)
    assert made == pytest.approx({"died_s": 0.1, "serves_s": 2.3, "tokens_s": 0.5, "older_weights": 0.0})
    newer = {"monotonic": 9.95, "server": "http://other", "version": 5, "is_again": False}
    assert found([*tokens, newer])[0]["older_weights"] == 1.0
    assert found(tokens, at=10.2) is None, "its death was before the kill"
    assert found(tokens, events=(*BEGUN, DIED)) is None, "it does not serve yet"


def test_a_server_that_made_nothing_when_it_was_killed_is_no_figure():
    tokens = [{"monotonic": 9.9, **OLD}]
    later = {"monotonic": 11.0, "server": "http://other", "version": 5, "is_again": False}
    assert found(tokens) is None
    assert found([*tokens, later]) == [], "the next step is being made, and nothing of this one was begun"


def test_each_arm_has_points_of_its_own_and_the_ledger_s_problems_are_told():
    struck = [Struck(arm="other", points={"tokens_s": 0.2}), Struck(arm="alone", points={"tokens_s": 2.4})]
    made = measured(Found(struck=struck, problems=["a prompt twice"]))
    assert made.points == {"other_tokens_s": [0.2], "alone_tokens_s": [2.4], "ledger_violations": [1.0]}
    assert made.notes == ["a prompt twice"]


@pytest.mark.parametrize("arm", [arm for arms in ARMS.values() for arm in arms], ids=lambda arm: arm.name)
def test_the_settings_of_each_run_contradict_nothing(arm):
    config = compose([PRESET, *SAME_WORK, *ENDLESS, *arm.settings, f"sglang.n_servers={arm.servers}"])
    assert list(find_contradictions(config)) == []


# ── stops ──

AT = 10.0
HANG = [
    {"event": "server.ready", "subject": "server-0", "monotonic": 1.0},
    {"event": "server.ready", "subject": "server-1", "monotonic": 1.5},
    {"event": "health.dead", "subject": "server-0", "monotonic": 2.0},
    {"event": "hedge.began", "subject": "server-0", "monotonic": 10.6},
    {"event": "hedge.began", "subject": "server-1", "monotonic": 10.7},
    {"event": "health.dead", "subject": "server-0", "monotonic": 11.5},
    {"event": "server.ready", "subject": "server-0", "monotonic": 30.0},
]


def test_what_followed_a_stop_is_of_that_server_and_after_it():
    made = after_stop(HANG, "server-0", AT, is_short=False)
    assert made == pytest.approx({"silent_s": 0.6, "condemned_s": 1.5, "serves_s": 20.0})
    assert "condemned_s" not in after_stop(HANG, "server-1", AT, is_short=False)


def test_each_verdict_on_a_short_stop_is_an_alarm():
    suspect = {"event": "health.suspect", "subject": "server-1", "monotonic": 12.0}
    assert after_stop([*HANG, suspect], "server-0", AT, is_short=True) == {"alarms": 2.0}
    assert after_stop(HANG[:5], "server-0", AT, is_short=True) == {"alarms": 0.0}, "one from before it is none"


def test_a_trainer_that_is_to_be_replaced_is_killed_when_the_next_one_is_parked():
    """The arm `parked` met one that was being parked: 4.7 s, where a parked one takes over in 1.5."""
    events, parked = [], []
    for name in ("trainer.parking", "trainer.parked", "trainer.took_over", "trainer.parking", "trainer.parked"):
        events.append({"event": name})
        parked.append(disturb.is_parked(events))
    assert parked == [False, True, False, False, True]
