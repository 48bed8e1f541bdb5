"""Each fault of a server is found in time, and none of the traps is taken for one."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health
from launcher.config.supervision import HealthConfig
from launcher.policy import liveness, observation_history
from launcher.policy.liveness import LONE_PROBE_FACTOR, judge_server
from launcher.policy.observation_history import ProcessLook, ServerEvidence, ServerLook, Task
from tests.support.simulated_run.watched_server import Interval, WatchedServer

SETTINGS = HealthConfig()
AT = 20.0
FOUND_WITHIN_S = 5.0

PHASES = (20.0, 20.15, 20.4, 20.65, 20.9)
"""When a fault begins against the looks and the probes."""

FAULTS = {
    "C2 scheduler stopped, busy": lambda at: WatchedServer(stopped={"scheduler": Interval(at)}),
    "C2 scheduler stopped, idle": lambda at: WatchedServer(
        stopped={"scheduler": Interval(at)}, waiting=Interval(0, 10)
    ),
    "C2 http stopped, busy": lambda at: WatchedServer(stopped={"http": Interval(at)}),
    "C2 http stopped, idle": lambda at: WatchedServer(stopped={"http": Interval(at)}, waiting=Interval(0, 10)),
    "C2 detokenizer stopped, health says 200": lambda at: WatchedServer(
        stopped={"detokenizer": Interval(at)}, health_status=200
    ),
    "C2 all stopped": lambda at: WatchedServer(
        stopped={role: Interval(at) for role in ("http", "scheduler", "detokenizer")}
    ),
    "C2 scheduler deadlocked": lambda at: WatchedServer(asleep=Interval(at)),
    "C2 scheduler deadlocked, idle": lambda at: WatchedServer(asleep=Interval(at), waiting=Interval(0, 10)),
    "C2 scheduler in an endless loop": lambda at: WatchedServer(spinning=Interval(at)),
    "C2 stopped while it loads weights": lambda at: WatchedServer(
        loading=Interval(at - 5, at + 60), stopped={"scheduler": Interval(at)}
    ),
}

TRAPS = {
    "X ten times longer generation": WatchedServer(tokens_per_s=4.0),
    "X ten times longer generation, its tokens not seen": WatchedServer(tokens_seen=False),
    "X 5 s stall of the reward function: nobody asks for anything": WatchedServer(waiting=Interval(0, AT)),
    "X slow weight load": WatchedServer(loading=Interval(AT, AT + 60)),
    "X garbage-collection pause of the server": WatchedServer(paused=Interval(AT, AT + 2)),
    "X garbage-collection pause of the monitor": WatchedServer(unwatched=Interval(AT, AT + 8)),
    "X both pause: the machine was suspended": WatchedServer(
        unwatched=Interval(AT, AT + 8), paused=Interval(AT - 1.2, AT + 8.5)
    ),
    "X busy: health says 503, probes are late, tokens flow": WatchedServer(answer_s=8.0, health_status=503),
    "X crowded machine: it wants to run and is not let": WatchedServer(starved=Interval(AT, AT + 9)),
    "X slow by habit: answers always take a second": WatchedServer(
        answer_s=1.0, usual_answer_s=1.0, paused=Interval(AT, AT + 5), waiting=Interval(0, 10)
    ),
    "C4 four times slower": WatchedServer(stopped={"scheduler": Interval(AT, period=1.0, share=0.75)}),
    "C4 four times slower, met stopped at every look": WatchedServer(
        stopped={"scheduler": Interval(AT - 0.05, period=0.25, share=0.75)}
    ),
    "C4 four times slower, idle, met stopped at every look": WatchedServer(
        stopped={"scheduler": Interval(AT - 0.05, period=0.2, share=0.75)}, waiting=Interval(0, 10)
    ),
    "C4 four times slower, in stops of almost a second": WatchedServer(
        stopped={"scheduler": Interval(AT, period=1.3, share=0.75)}
    ),
}


def found_after_s(fault, at=AT):
    return next((t - at for t, verdict in fault(at).watch(at + 40) if verdict.health is Health.DEAD), None)


def alarms(server):
    return [(t, v) for t, v in server.watch(AT + 100) if v.health in (Health.DEAD, Health.SUSPECT)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_hang_is_found_within_five_seconds_and_not_before_it_began(name):
    delays_s = [found_after_s(FAULTS[name], at) for at in PHASES]
    assert None not in delays_s
    assert min(delays_s) > 0
    assert max(delays_s) <= FOUND_WITHIN_S


def test_an_endless_loop_while_nobody_asks_is_suspected_soon_and_condemned_later():
    """Only the probe waits then: one witness, until it has waited so long that nobody can be said to get tokens."""
    verdicts = WatchedServer(spinning=Interval(AT), waiting=Interval(0, 10)).watch(AT + 40)
    suspected = next(t for t, v in verdicts if v.health is Health.SUSPECT) - AT
    condemned = next(t for t, v in verdicts if v.health is Health.DEAD) - AT
    assert suspected <= FOUND_WITHIN_S
    assert condemned <= SETTINGS.silence_s * LONE_PROBE_FACTOR + 2


def test_a_server_that_answers_errors_at_once_is_condemned_though_a_client_waits_at_every_other_look():
    """It held a whole run: each look without a client forgot how long clients had waited, and the other way round."""
    first = ServerLook(at=0.0, processes=None, answered_at=0.0, tokens=9)
    evidence, at = ServerEvidence(look=first), 0.0
    while (verdict := judge_server(evidence, SETTINGS, at)).health is not Health.DEAD and at < 60:
        at += SETTINGS.look_interval_s
        waiting = round(at / SETTINGS.look_interval_s) % 2
        look = dataclasses.replace(first, at=at, probe_waits=True, probe_failure="HTTP 500", waiting=waiting)
        evidence = observation_history.observe(evidence, look, SETTINGS)
    assert at <= SETTINGS.silence_s * LONE_PROBE_FACTOR + 1
    assert "one-token generation unanswered for 15.0 s (HTTP 500); no token for anybody" in verdict.reason


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_raises_no_alarm(name):
    assert alarms(TRAPS[name]) == []


def test_a_server_that_was_stopped_and_goes_on_is_healthy_again():
    server = WatchedServer(stopped={"scheduler": Interval(AT, AT + 3.5)})
    verdicts = server.watch(AT + 10)
    assert verdicts[-1][1].health is Health.HEALTHY


def test_before_its_first_token_a_server_is_unknown_never_healthy():
    server = WatchedServer(paused=Interval(0, 2))
    assert {v.health for t, v in server.watch(2)} == {Health.UNKNOWN}


def test_a_load_past_its_deadline_is_condemned():
    server = WatchedServer(loading=Interval(AT))
    after_s = next((t - AT for t, v in server.watch(AT + 130) if v.health is Health.DEAD), None)
    assert after_s == pytest.approx(120.0, abs=SETTINGS.look_interval_s)


# ── each witness and each precaution, taken away: what it is there for goes wrong ──


@pytest.mark.parametrize(
    ("witness", "fault"),
    [
        ("_tokens_vote", "C2 scheduler in an endless loop"),
        ("_answer_vote", "C2 scheduler deadlocked, idle"),
        ("_process_vote", "C2 scheduler deadlocked, idle"),
    ],
)
def test_without_one_witness_a_fault_is_missed(monkeypatch, witness, fault):
    assert found_after_s(FAULTS[fault]) is not None
    monkeypatch.setattr(liveness, witness, lambda *args: liveness.ABSTAINS)
    assert (found_after_s(FAULTS[fault]) or float("inf")) > FOUND_WITHIN_S


def test_were_one_witness_enough_a_busy_server_would_be_killed(monkeypatch):
    monkeypatch.setattr(liveness, "VOTES_FOR_A_HANG", 1)
    assert alarms(TRAPS["X busy: health says 503, probes are late, tokens flow"])


def test_did_time_count_while_nobody_looked_a_pause_of_the_monitor_would_kill(monkeypatch):
    monkeypatch.setattr(observation_history, "LONGEST_GAP", 1e9)
    assert alarms(TRAPS["X both pause: the machine was suspended"])


def test_were_starvation_counted_a_crowded_machine_would_kill(monkeypatch):
    monkeypatch.setattr(observation_history, "_starved", lambda before, look: False)
    assert alarms(TRAPS["X crowded machine: it wants to run and is not let"])


def test_did_a_load_not_excuse_a_slow_one_would_kill(monkeypatch):
    monkeypatch.setattr(liveness, "_votes_at_task", lambda *args: (STUCK, STUCK))
    assert alarms(TRAPS["X slow weight load"])


STUCK = liveness.Vote("made so by the test")

# ── single verdicts ──


def test_a_count_of_tokens_that_comes_and_goes_says_nothing_while_it_is_away():
    looks = [ServerLook(at=float(t), processes={}, waiting=1, tokens=None if t % 2 else 7) for t in range(60)]
    evidence = ServerEvidence(look=looks[0])
    for look in looks[1:]:
        evidence = observation_history.observe(evidence, look, SETTINGS)
        assert judge_server(evidence, SETTINGS, look.at).health is Health.UNKNOWN


LOOK = ServerLook(at=100.0, processes={"scheduler": ProcessLook(state="S", cpu_s=5.0)}, answered_at=99.0, waiting=3)


@pytest.mark.parametrize(
    ("evidence", "health", "reason"),
    [
        (None, Health.UNKNOWN, "never looked at"),
        (ServerEvidence(look=LOOK), Health.HEALTHY, "made a token 1.0 s ago"),
        (ServerEvidence(look=dataclasses.replace(LOOK, at=80.0)), Health.UNKNOWN, "not looked at for 20.0 s"),
        (
            ServerEvidence(look=dataclasses.replace(LOOK, answered_at=80.0)),
            Health.UNKNOWN,
            "last token 20.0 s ago",
        ),
        (ServerEvidence(look=dataclasses.replace(LOOK, answered_at=None)), Health.UNKNOWN, "no token seen yet"),
        (
            ServerEvidence(
                look=dataclasses.replace(
                    LOOK, answered_at=None, task=Task(name="starting", since=80.0, deadline_s=300.0)
                )
            ),
            Health.UNKNOWN,
            "starting for 20.0 s of at most 300 s",
        ),
        (
            ServerEvidence(look=LOOK, stopped_s=4.0, stopped=frozenset({"http"})),
            Health.DEAD,
            "http stopped for 4.0 s",
        ),
        (
            ServerEvidence(look=dataclasses.replace(LOOK, answered_at=90.0), unanswered_s=4.0),
            Health.SUSPECT,
            "one-token generation unanswered for 4.0 s",
        ),
        (
            ServerEvidence(look=LOOK, unanswered_s=4.0, token_at=99.5),
            Health.HEALTHY,
            "made a token 0.5 s ago; one-token generation unanswered for 4.0 s",
        ),
        (
            ServerEvidence(look=dataclasses.replace(LOOK, answered_at=96.0), unanswered_s=4.0, dry_s=3.5),
            Health.DEAD,
            "one-token generation unanswered for 4.0 s; 3 requests without a token for 3.5 s",
        ),
        (
            ServerEvidence(look=dataclasses.replace(LOOK, health_status=503)),
            Health.HEALTHY,
            "made a token 1.0 s ago; health endpoint says 503",
        ),
    ],
)
def test_a_verdict_and_its_reason(evidence, health, reason):
    verdict = judge_server(evidence, SETTINGS, 100.0)
    assert (verdict.health, verdict.reason) == (health, reason)
    assert (verdict.cause is Cause.SERVER_HANG) is (health is Health.DEAD)


@pytest.mark.parametrize(("dead_at", "proof_at"), [(float("-inf"), 99.5), (99.25, 99.5), (99.5, None)])
def test_what_a_server_made_before_it_was_found_dead_proves_nothing(dead_at, proof_at):
    assert ServerEvidence(look=LOOK, token_at=99.5, dead_at=dead_at).proof_at == proof_at


BUSY = dataclasses.replace(LOOK, usual_answer_s=0.5)  # ten of its answers are 5 s
LONG = Task(name="loading weights", since=80.0, deadline_s=30.0)
OVERDUE = dataclasses.replace(LOOK, at=110.0, task=LONG)


@pytest.mark.parametrize(
    ("look", "evidence", "health", "said"),
    [
        (LOOK, {"at": 109.0}, Health.HEALTHY, "made a token 10.0 s ago"),
        (LOOK, {"at": 109.1}, Health.UNKNOWN, "last token 10.1 s ago"),
        (LOOK, {"at": 110.0}, Health.UNKNOWN, "last token 11.0 s ago"),
        (LOOK, {"at": 110.1}, Health.UNKNOWN, "not looked at for 10.1 s"),
        (LOOK, {"stopped_s": 1.1, "stopped": frozenset({"http"})}, Health.HEALTHY, "made a token"),
        (LOOK, {"stopped_s": 1.2, "stopped": frozenset({"http"})}, Health.DEAD, "http stopped for 1.2 s"),
        (LOOK, {"frozen_s": 2.9}, Health.HEALTHY, "made a token"),
        (LOOK, {"frozen_s": 3.0}, Health.SUSPECT, "scheduler asleep for 3.0 s"),
        (BUSY, {"frozen_s": 4.9}, Health.HEALTHY, "made a token"),
        (BUSY, {"frozen_s": 5.0}, Health.SUSPECT, "scheduler asleep for 5.0 s"),
        (LOOK, {"frozen_s": 3.0, "unanswered_s": 2.9}, Health.SUSPECT, "scheduler asleep"),
        (
            LOOK,
            {"frozen_s": 3.0, "unanswered_s": 3.0},
            Health.DEAD,
            "scheduler asleep for 3.0 s with work waiting; one-token",
        ),
        (LOOK, {"frozen_s": 3.0, "dry_s": 2.9}, Health.SUSPECT, "scheduler asleep"),
        (
            LOOK,
            {"frozen_s": 3.0, "dry_s": 3.0},
            Health.DEAD,
            "scheduler asleep for 3.0 s with work waiting; 3 requests",
        ),
        (LOOK, {"frozen_s": 3.0, "barren_s": 14.9}, Health.SUSPECT, "scheduler asleep"),
        (
            LOOK,
            {"frozen_s": 3.0, "barren_s": 15.0},
            Health.DEAD,
            "scheduler asleep for 3.0 s with work waiting; no token",
        ),
        (LOOK, {"dry_s": 3.0}, Health.HEALTHY, "made a token 1.0 s ago; 3 requests without a token for 3.0 s"),
        (dataclasses.replace(LOOK, answered_at=97.0), {"dry_s": 3.0}, Health.HEALTHY, "made a token 3.0 s ago"),
        (dataclasses.replace(LOOK, answered_at=96.9), {"dry_s": 3.0}, Health.SUSPECT, "3 requests without"),
        (dataclasses.replace(LOOK, task=LONG), {"at": 109.9, "stopped_s": 1.1}, Health.UNKNOWN, "loading weights for"),
        (
            dataclasses.replace(LOOK, task=LONG),
            {"stopped_s": 1.2, "stopped": frozenset({"http"})},
            Health.DEAD,
            "http stopped for 1.2 s",
        ),
        (
            dataclasses.replace(LOOK, at=110.0, task=LONG),
            {"at": 110.0},
            Health.DEAD,
            "loading weights for 30.0 s, more than 30 s; no token for 11.0 s",
        ),
        (
            dataclasses.replace(LOOK, at=110.0, task=LONG, answered_at=60.0),
            {"at": 110.0},
            Health.DEAD,
            "loading weights for 30.0 s, more than 30 s; no token for 30.0 s",
        ),
        (
            dataclasses.replace(LOOK, at=110.0, task=LONG),
            {"at": 110.0, "token_at": 109.0},
            Health.HEALTHY,
            "made a token",
        ),
        (
            OVERDUE,
            {"at": 110.0, "token_at": 107.0},
            Health.DEAD,
            "loading weights for 30.0 s, more than 30 s; no token for 3",
        ),
        (
            dataclasses.replace(OVERDUE, answered_at=None),
            {"at": 110.0},
            Health.DEAD,
            "loading weights for 30.0 s, more",
        ),
        (dataclasses.replace(LOOK, health_status=200), {}, Health.HEALTHY, "made a token 1.0 s ago"),
    ],
)
def test_each_bound_of_a_verdict_from_both_sides(look, evidence, health, said):
    seen = {name: value for name, value in evidence.items() if name != "at"}
    verdict = judge_server(ServerEvidence(look=look, **seen), SETTINGS, evidence.get("at", 100.0))
    assert verdict.health is health, verdict
    assert verdict.reason.startswith(said)
    assert "200" not in verdict.reason
