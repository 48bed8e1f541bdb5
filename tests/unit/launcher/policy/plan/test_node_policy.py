"""What is done when a node is lost: a place elsewhere is taken at once, and one that isn't there is waited for."""

import dataclasses

from launcher.base.messages import Cause, Health, ServerState, TerminalStatus, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.actions import Halt
from launcher.policy.observed import RunState
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import NOW, attempts, dead, decide, kinds, observed, server, trainer

LOST = Verdict(health=Health.DEAD, reason="node 10.0.0.7 was lost", cause=Cause.NODE_LOST)
CONFIG = RunConfig()
CONFIG.cluster.node_wait_s = 100.0


def unschedulable(number=0, since=NOW - 10):
    return dead(number, LOST, unschedulable_since=since)


def test_one_without_a_place_is_waited_for_and_the_others_go_on_without_it():
    for since in (NOW - 10, NOW - 10_000):
        made = decide(observed(server(0), unschedulable(1, since)), config=CONFIG)
        assert made.actions == ()
        assert made.state is RunState.RUNNING, "a smaller fleet is no repair"


def test_without_any_server_the_run_waits_for_a_node_and_not_for_ever():
    made = decide(observed(unschedulable(0), unschedulable(1)), config=CONFIG)
    assert made.actions == ()
    assert made.wake_at == NOW - 10 + 100
    assert "waits for a node" in made.reason
    (halt,) = decide(observed(unschedulable(0, NOW - 100), unschedulable(1, NOW - 100)), config=CONFIG).actions
    assert isinstance(halt, Halt)
    assert halt.word is TerminalStatus.ERRORED
    assert "cluster.node_wait_s" in halt.reason


def test_a_server_that_is_given_up_is_no_reason_to_go_on_without_one():
    gone = dataclasses.replace(dead(1), state=ServerState.FAILED)
    seen = observed(unschedulable(0, NOW - 1000), gone)
    made = decide(seen, config=CONFIG)
    assert [action.name for action in made.actions] == ["s1"], "it has restarts left"
    rungs = [Rung.SERVER] * CONFIG.restart.server
    halt = decide(seen, attempts(*rungs, cause=Cause.SERVER_CRASH, subject="s1"), config=CONFIG)
    assert kinds(halt) == [Halt]
    assert "Ray has found no node for any server for 1000 s (cluster.node_wait_s)" in halt.actions[0].reason


def test_a_trainer_without_a_place_is_waited_for_and_not_for_ever():
    lost = trainer(verdict=LOST, is_loaded=False, unschedulable_since=NOW - 10)
    made = decide(observed(server(), trainer=lost), config=CONFIG)
    assert (made.actions, made.wake_at) == ((), NOW + 90)
    made = decide(observed(server(), trainer=dataclasses.replace(lost, unschedulable_since=NOW - 100)), config=CONFIG)
    assert kinds(made) == [Halt]
