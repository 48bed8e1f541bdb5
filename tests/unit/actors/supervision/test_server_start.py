"""Starts of a server that lead nowhere: none of them is waited for for ever."""

import asyncio

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.supervision import server_handle
from actors.supervision.server_handle import ServerHandle
from launcher.base.errors import ServerError
from launcher.base.messages import Health, ServerState
from tests.support.machine import scaled
from tests.support.worlds.supervision import WEIGHTS, facts, handle


def hanging(monkeypatch, slot_actor, *methods):
    monkeypatch.setattr(server_handle, "ANSWER_S", 0.02)
    monkeypatch.setattr(server_handle, "STOP_S", 0.05)
    ended = []
    monkeypatch.setattr(server_handle.ray, "kill", lambda actor, no_restart: ended.append((actor, no_restart)))
    for name in methods:
        getattr(slot_actor, name).remote = lambda *args, **kwargs: asyncio.get_running_loop().create_future()
    return ended


async def test_one_whose_actor_is_never_there_is_dead_after_its_start_was_given_up(monkeypatch):
    """Ray keeps an actor that no machine has room for pending, without end. One that hangs is ended, for the next try:
    it was to end its server, and would do so again only when it continues."""
    slot, actor, _ = handle()
    ended = hanging(monkeypatch, actor, "stop", "report")
    slot.expect()
    before = facts(slot).verdict.health
    with pytest.raises(ServerError, match="does not come back"):
        await slot.start(0, WEIGHTS, {})
    after = facts(slot)
    assert before is Health.UNKNOWN
    assert (after.state, after.verdict.health) == (ServerState.DEAD, Health.DEAD)
    assert "does not come back" in after.verdict.reason
    assert ended == [(actor, False)]


@pytest.mark.parametrize("method", ["start", "wait_ready"])
async def test_one_whose_start_does_not_end_is_dead_though_its_actor_says_starting(monkeypatch, method):
    slot, actor, _ = handle()
    hanging(monkeypatch, actor, method)
    slot._setup_s = 0.02
    actor.state = ServerState.STARTING
    with pytest.raises(ActorAway):
        await slot.start(0, WEIGHTS, {})
    actor.generation = 0
    actor.tell(slot)
    assert facts(slot).state is ServerState.DEAD
    actor.state = ServerState.READY
    actor.tell(slot)
    assert facts(slot).state is ServerState.STALE  # it came after all, before anybody ended it


async def test_one_that_was_adopted_while_it_started_has_a_deadline(monkeypatch):
    slot, actor, _ = handle()
    monkeypatch.setattr(server_handle, "STOP_S", 0.01)
    slot._setup_s = scaled(0.5)
    actor.generation = 0
    actor.state = ServerState.STARTING
    await slot.adopt(0, 1)
    seen = [facts(slot).state]
    while seen[-1] is ServerState.STARTING:
        await asyncio.sleep(0.005)
        seen.append(facts(slot).state)
    assert len(seen) > 2  # it had its time
    assert seen[-1] is ServerState.DEAD


async def test_why_its_start_failed_is_told_where_its_actor_still_has_the_one_before(monkeypatch):
    slot, actor, _ = handle()
    await slot.start(0, WEIGHTS, {})
    hanging(monkeypatch, actor, "start")
    with pytest.raises(ActorAway):
        await slot.start(1, WEIGHTS, {})
    assert "did not answer within" in facts(slot).verdict.reason


async def test_one_for_which_there_are_no_weights_to_start_from_is_dead_and_not_expected_for_ever():
    slot, _, _ = handle()
    slot.expect()
    slot.not_started("the folder can't be listed")
    assert facts(slot).verdict.reason == "the folder can't be listed"


async def test_without_giving_up_it_would_be_starting_for_ever(monkeypatch):
    monkeypatch.setattr(ServerHandle, "_given_up", lambda self: None)
    slot, actor, _ = handle()
    hanging(monkeypatch, actor, "stop", "report")
    with pytest.raises(ServerError):
        await slot.start(0, WEIGHTS, {})
    seen = facts(slot)
    assert (seen.state, seen.verdict.health) == (ServerState.STARTING, Health.UNKNOWN)
