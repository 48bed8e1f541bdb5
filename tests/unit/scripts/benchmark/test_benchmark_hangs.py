"""What the benchmark of hangs reads in a journal. Nothing is timed."""

from scripts.benchmark.failover import served
from scripts.benchmark.hangs import outcome

AT = 10.0
EVENTS = [
    {"event": "server.ready", "subject": "server-0", "monotonic": 1.0},
    {"event": "server.ready", "subject": "server-1", "monotonic": 1.5},
    {"event": "health.dead", "subject": "server-0", "monotonic": 2.0},
    {"event": "hedge.began", "subject": "server-0", "monotonic": 10.6},
    {"event": "hedge.began", "subject": "server-1", "monotonic": 10.7},
    {"event": "hedge.ended", "subject": "server-0", "monotonic": 11.1},
    {"event": "health.dead", "subject": "server-0", "monotonic": 11.5},
    {"event": "server.ready", "subject": "server-0", "monotonic": 30.0},
]


def test_what_followed_a_stop_is_of_that_server_and_after_it():
    made = outcome(EVENTS, "server-0", AT, part="http", is_short=False)
    seconds = (made.silent_s, made.moved_s, made.condemned_s, made.serves_s)
    assert [round(s, 6) for s in seconds] == [0.6, 1.1, 1.5, 20.0]
    assert outcome(EVENTS, "server-1", AT, part="http", is_short=False).moved_s is None


def test_each_verdict_on_a_short_stop_is_an_alarm():
    suspect = {"event": "health.suspect", "subject": "server-1", "monotonic": 12.0}
    assert outcome([*EVENTS, suspect], "server-0", AT, part="both", is_short=True).alarms == 2
    assert outcome(EVENTS[:6], "server-0", AT, part="both", is_short=True).alarms == 0


def test_servers_have_traffic_when_each_is_ready():
    assert served(EVENTS[:2])
    assert not served([])
    assert not served([*EVENTS[:2], {"event": "server.died", "subject": "server-1"}])
