"""What became of each fault, from the injector's record and what the run wrote."""

import pytest

from scripts.faults.kinds import KINDS
from scripts.faults.outcome import NOTICED, outcomes, role_of


def fired(kind, target, at, **more):
    return {"what": "fired", "kind": kind, "target": target, "began_monotonic": at, "monotonic": at + 0.5, **more}


def event(name, subject, at):
    return {"event": name, "subject": subject, "monotonic": at}


COMMITS = [(float(step), step) for step in range(10)]


def test_a_server_is_noticed_serves_again_and_costs_no_step():
    events = [
        event("server.died", "server-1", 4.4),  # before the fault
        event("server.died", "server-0", 5.51),  # another
        event("server.died", "server-1", 5.52),
        event("server.ready", "server-0", 6.0),
        event("server.ready", "server-1", 9.5),
    ]
    (outcome,) = outcomes([fired("C1", "server-1", 5.5)], events, COMMITS)
    assert outcome.noticed_s == pytest.approx(0.02)
    assert outcome.serves_s == pytest.approx(4.0)
    assert outcome.next_step_s == pytest.approx(0.5)
    assert (outcome.step, outcome.taken_back) == (5, 0)


def test_a_trainer_that_went_back_took_steps_back():
    commits = [*COMMITS[:6], (8.0, 3), (9.0, 4), (10.0, 5), (11.0, 6)]
    (outcome,) = outcomes([fired("T1", "trainer", 5.5)], [event("trainer.died", "trainer", 5.6)], commits)
    assert outcome.taken_back == 3
    assert outcome.next_step_s == pytest.approx(2.5)


def test_what_was_taken_back_for_a_later_fault_is_not_counted_twice():
    commits = [(1.0, 0), (2.0, 1), (4.0, 1), (5.0, 2), (7.0, 2), (8.0, 3)]
    record = [fired("T1", "trainer", 2.5), fired("T1", "trainer", 5.5)]
    assert [outcome.taken_back for outcome in outcomes(record, [], commits)] == [1, 1]


def test_the_moment_of_the_signal_counts_and_not_that_of_the_decision():
    record = [fired("T1", "trainer", 2.0, signalled_monotonic=4.5)]
    (outcome,) = outcomes(record, [event("trainer.died", "trainer", 4.6)], COMMITS)
    assert outcome.noticed_s == pytest.approx(0.1)


def test_one_that_nobody_noticed_says_so():
    (outcome,) = outcomes([fired("C5", "server-0", 20.0)], [], COMMITS)
    assert (outcome.noticed_s, outcome.serves_s, outcome.next_step_s) == (None, None, None)


def test_what_the_next_fault_of_a_server_did_is_no_notice_of_the_one_before():
    record = [fired("C5", "server-0", 2.0), fired("T1", "trainer", 4.0), fired("C1", "server-0", 6.0)]
    first, _, last = outcomes(record, [event("server.died", "server-0", 6.1)], COMMITS)
    assert (first.noticed_s, last.noticed_s) == (None, pytest.approx(0.1))
    events = [event("server.died", "server-0", 6.1), event("server.ready", "server-0", 9.0)]
    first, _, last = outcomes(record, events, COMMITS)
    assert (first.died_s, first.serves_s, last.serves_s) == (None, None, pytest.approx(3.0))
    late, _, _ = outcomes(record, [event("health.dead", "server-0", 5.0)], COMMITS)
    assert late.noticed_s == pytest.approx(3.0), "a fault of the trainer ends nothing of a server"


@pytest.mark.parametrize(
    ("kind", "target", "cause", "is_noticed"),
    [
        ("C5", "server-0", "server_stale", True),
        ("C5", "server-0", "reward_collapse", True),
        ("C5", "server-0", "verifier_broken", False),
        ("T3", "reward", "verifier_broken", True),
        ("T3", "reward", "server_stale", False),
    ],
)
def test_a_batch_that_was_rejected_for_another_fault_is_no_notice(kind, target, cause, is_noticed):
    rejected = {**event("batch.rejected", "trainer", 5.0), "cause": cause}
    (outcome,) = outcomes([fired(kind, target, 4.5)], [rejected], COMMITS)
    assert (outcome.noticed_s is not None) is is_noticed


def test_an_end_that_the_run_itself_brings_about_notices_no_fault():
    events = [event("run.halting", "run", 9.5), event("health.dead", "server-0", 9.6)]
    (outcome,) = outcomes([fired("C2", "server-0", 5.0)], events, COMMITS)
    assert (outcome.noticed_s, outcome.noticed_by) == (None, "")


def test_what_did_not_fire_has_no_outcome():
    assert outcomes([{"what": "missed", "kind": "C1", "monotonic": 1.0}], [], COMMITS) == []


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        *[("C7", "server"), ("T1", "trainer"), ("M1", "supervisor"), ("S1", "reward")],
        *[("X-long", "server"), ("X-gc", "trainer"), ("X-reward", "reward"), ("X-none", "run")],
        *[("T3", "reward"), ("N2", "cluster"), ("M2", "supervisor"), ("of another version", "run")],
    ],
)
def test_each_kind_is_noticed_by_the_events_that_its_declaration_names(kind, role):
    assert role_of(kind) == role


def test_it_is_known_of_every_kind_which_events_notice_it():
    assert {role_of(kind) for kind in KINDS} <= {*NOTICED}
