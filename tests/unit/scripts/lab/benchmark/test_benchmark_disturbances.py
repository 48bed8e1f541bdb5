"""What the benchmarks of kills and hangs read in the files of a run. Nothing is timed."""

from scripts.health.recorded_run import RecordedRun
from scripts.lab.benchmark import failover, hangs, trainer_kills
from scripts.lab.benchmark.failover import Kill, outcome

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
        view.take(event)
    return failover.served(view, 2)


def test_a_kill_waits_until_all_servers_serve():
    assert not is_served(BEGUN[:2])
    assert is_served(BEGUN)
    assert not is_served([*BEGUN, DIED])
    assert not is_served([*BEGUN, DIED, {"event": "server.restarting", "subject": "server-0"}])
    assert is_served([*BEGUN, DIED, BACK])


def found(tokens, at=10.0, events=(*BEGUN, DIED, BACK)):
    return outcome("other", at, "server-0", "http://old", events, tokens)


def test_the_first_tokens_are_those_that_go_on_with_what_the_killed_server_made():
    tokens = [
        {"monotonic": 9.9, **OLD},
        {"monotonic": 10.05, **OLD, "is_again": True},  # was on its way already
        {"monotonic": 10.1, "server": "http://other", "version": 4, "is_again": False},  # its own
    ]
    assert found(tokens) is None
    tokens.append({"monotonic": 10.5, "server": "http://other", "version": 4, "is_again": True})
    (made,) = found(tokens)
    assert [round(s, 3) for s in (made.died_s, made.serves_s, made.tokens_s)] == [0.1, 2.3, 0.5]
    assert (made.version, made.newest) == (4, 4)
    assert found(tokens, at=10.2) is None, "its death was before the kill"
    assert found(tokens, events=(*BEGUN, DIED)) is None, "it does not serve yet"


def test_a_server_that_made_nothing_when_it_was_killed_is_no_figure():
    tokens = [{"monotonic": 9.9, **OLD}]
    later = {"monotonic": 11.0, "server": "http://other", "version": 5, "is_again": False}
    assert found(tokens) is None
    assert found([*tokens, later]) == [], "the next step is being made, and nothing of this one was begun"


def test_each_arm_has_points_of_its_own():
    made = [
        Kill(arm=arm, died_s=0.1, serves_s=0.2, tokens_s=seconds, version=3, newest=3)
        for arm, seconds in (("other", 0.2), ("alone", 2.4))
    ]
    found = failover.measured(made, ["a prompt twice"])
    assert (found.points["other_tokens_s"], found.points["alone_tokens_s"]) == ([0.2], [2.4])
    assert (found.points["older_versions"], found.points["ledger_violations"]) == ([0.0, 0.0], [1.0])


def test_a_killed_trainer_s_wait_is_counted_beyond_a_step_too():
    kill = trainer_kills.TrainerKill(arm="cold", after_s=9.0, noticed_s=None, step_s=1.0, load=2.0)
    found = trainer_kills.points_of([kill], ["exit code 3"])
    assert (found["cold_next_step_s"], found["cold_beyond_a_step_s"], found["cold_noticed_s"]) == ([9.0], [8.0], [])
    assert (found["kills"], found["lost"], found["parked_next_step_s"]) == ([1.0], [1.0], [])


# ── hangs ──

AT = 10.0
HANG = [
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
    made = hangs.outcome(HANG, "server-0", AT, part="http", is_short=False)
    seconds = (made.silent_s, made.moved_s, made.condemned_s, made.serves_s)
    assert [round(s, 6) for s in seconds] == [0.6, 1.1, 1.5, 20.0]
    assert hangs.outcome(HANG, "server-1", AT, part="http", is_short=False).moved_s is None


def test_each_verdict_on_a_short_stop_is_an_alarm():
    suspect = {"event": "health.suspect", "subject": "server-1", "monotonic": 12.0}
    short = hangs.outcome([*HANG, suspect], "server-0", AT, part="both", is_short=True)
    quiet = hangs.outcome(HANG[:6], "server-0", AT, part="both", is_short=True)
    found = hangs.measured([short, quiet], [])
    assert found.points["alarms"] == [2.0, 0.0], "a short one has no times"
    assert found.points["condemned_s"] == [], "a short one has no times"
