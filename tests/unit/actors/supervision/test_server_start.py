"""Starts of a server that lead nowhere: none of them is waited for for ever."""

import asyncio

import pytest
from ray.exceptions import RayTaskError

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
    for name in methods:
        getattr(slot_actor, name).remote = lambda *args, **kwargs: asyncio.get_running_loop().create_future()


async def test_one_whose_actor_is_never_there_is_dead_after_its_start_was_given_up(monkeypatch):
    """Ray keeps an actor that no machine has room for pending, without end."""
    async with handle() as (slot, actor, _):
        hanging(monkeypatch, actor, "info")
        slot.expect()
        before = facts(slot).verdict.health
        with pytest.raises(ServerError, match="does not come back"):
            await slot.start(0, WEIGHTS, {})
        after = facts(slot)
    assert before is Health.UNKNOWN
    assert (after.state, after.verdict.health) == (ServerState.DEAD, Health.DEAD)
    assert "does not come back" in after.verdict.reason


@pytest.mark.parametrize("method", ["start", "wait_ready"])
async def test_one_whose_start_does_not_end_is_dead_though_its_actor_says_starting(monkeypatch, method):
    async with handle() as (slot, actor, _):
        hanging(monkeypatch, actor, method)
        slot._setup_s = 0.02
        actor.state = ServerState.STARTING
        with pytest.raises(ActorAway):
            await slot.start(0, WEIGHTS, {})
        actor.generation = 0
        await slot.probe.refresh()
        assert facts(slot).state is ServerState.DEAD
        actor.state = ServerState.READY
        await slot.probe.refresh()
        assert facts(slot).state is ServerState.STALE  # it came after all, before anybody ended it


async def test_one_that_was_adopted_while_it_started_has_a_deadline(monkeypatch):
    async with handle() as (slot, actor, _):
        monkeypatch.setattr(server_handle, "STOP_S", 0.01)
        slot._setup_s = scaled(0.5)
        actor.generation, actor.state = 0, ServerState.STARTING
        slot.adopt(0, 1)
        await slot.probe.refresh()
        seen = [facts(slot).state]
        while seen[-1] is ServerState.STARTING:
            await asyncio.sleep(0.005)
            seen.append(facts(slot).state)
    assert len(seen) > 2  # it had its time
    assert seen[-1] is ServerState.DEAD


async def test_one_for_which_there_are_no_weights_to_start_from_is_dead_and_not_expected_for_ever():
    async with handle() as (slot, _, _):
        slot.expect()
        slot.not_started("the folder can't be listed")
        assert facts(slot).verdict.reason == "the folder can't be listed"


async def test_an_answer_that_is_a_defect_of_the_actor_costs_one_look(monkeypatch):
    async with handle() as (slot, actor, _):
        monkeypatch.setattr(server_handle, "LOOK_S", 0.005)
        info, fails = actor.info.remote, [True]

        async def once():
            if fails:
                fails.clear()
                raise RayTaskError("info", "traceback", KeyError("a defect"))
            return await info()

        actor.info.remote = once
        slot.begin_looking()
        actor.generation = 4
        async with asyncio.timeout(10):
            while slot._info is None:
                await asyncio.sleep(0.005)


async def test_without_giving_up_it_would_be_starting_for_ever(monkeypatch):
    monkeypatch.setattr(ServerHandle, "_given_up", lambda self, running: None)
    async with handle() as (slot, actor, _):
        hanging(monkeypatch, actor, "info")
        with pytest.raises(ServerError):
            await slot.start(0, WEIGHTS, {})
        seen = facts(slot)
    assert (seen.state, seen.verdict.health) == (ServerState.STARTING, Health.UNKNOWN)
