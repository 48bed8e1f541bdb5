"""What the failover benchmark takes for a parked standby, and for the first tokens after a kill. Nothing is timed."""

from scripts.benchmark.failover import Kill, outcome, parked

BEGUN = [
    {"event": "server.starting", "subject": "server-0"},
    {"event": "server.ready", "subject": "server-0", "monotonic": 1.0},
    {"event": "server.joining", "subject": "server-1", "is_standby": True},
    {"event": "server.starting", "subject": "server-1"},
    {"event": "server.joined", "subject": "server-1"},
    {"event": "server.loading", "subject": "server-1"},
]
PARKED = {"event": "server.parked", "subject": "server-1"}
DIED = {"event": "server.died", "subject": "server-0", "monotonic": 10.1}
PROMOTED = {"event": "server.promoted", "subject": "server-1", "replaces": "server-0", "monotonic": 10.3}


def test_a_kill_waits_for_a_parked_standby_beside_servers_with_traffic():
    assert parked(BEGUN) is None
    assert parked([*BEGUN, PARKED]) == "server-1"
    assert parked([*BEGUN, PARKED, DIED]) is None
    assert parked([*BEGUN, PARKED, DIED, PROMOTED, {"event": "server.restarting", "subject": "server-0"}]) is None
    swapped = [*BEGUN, PARKED, DIED, PROMOTED, {"event": "server.parked", "subject": "server-0"}]
    assert parked(swapped) == "server-0"


def test_the_first_tokens_are_those_of_a_server_that_was_not_killed():
    events = [*BEGUN, PARKED, DIED, PROMOTED]
    tokens = [
        {"monotonic": 9.9, "server": "http://old", "version": 4},
        {"monotonic": 10.05, "server": "http://old", "version": 4},  # was on its way already
    ]
    assert outcome("standby", 10.0, {"http://old"}, events, tokens) is None
    tokens.append({"monotonic": 10.5, "server": "http://new", "version": 4})
    made = outcome("standby", 10.0, {"http://old"}, events, tokens)
    assert made is not None
    assert [round(s, 3) for s in (made.died_s, made.serves_s, made.tokens_s)] == [0.1, 0.3, 0.5]
    assert (made.version, made.newest) == (4, 4) and isinstance(made, Kill)
    assert outcome("standby", 10.2, {"http://old"}, events, tokens) is None, "its death was before the kill"
