"""What the pool believes of news about servers: unknown ones, earlier incarnations, and what it has counted."""

import asyncio

import pytest

from actors.rollout import server_pool
from actors.rollout.server_pool import RequestMoved
from launcher.base.messages import ServerState
from tests.support.machine import all_turns
from tests.support.worlds.rollout import HOLD_S, assert_none_is_leased, leased, pool, server, turn


async def test_each_answer_counts_once_as_progress_also_one_that_failed():
    """The trainer is hung where this does not grow (actors/training/training.py)."""
    servers = pool()
    await servers.update([server()])
    counts = [servers.released]
    await leased(servers, 0)
    counts.append(servers.released)
    with pytest.raises(ValueError):
        async with servers.acquire(0):
            counts.append(servers.released)
            raise ValueError
    assert [*counts, servers.released] == [0, 1, 1, 2]


async def test_a_server_that_nobody_has_told_of_is_not_over_not_living_and_leaves_at_once():
    servers = pool()
    answer = await servers.unless_ended(server(), asyncio.sleep(0, "an answer"))
    await servers.suspect(("server-0", 0), "reset")
    await servers.mark_stale(("server-0", 0), "other weights")
    await servers.confirm(("server-0", 0), 3)
    left = await servers.drain("server-0", within_s=0.01)
    before = servers.servers(), servers.is_living(server())
    await servers.update_if_alive(server())
    after, is_living = servers.servers(), servers.is_living(server())
    assert (answer, left, before) == ("an answer", 0, ((), False))
    assert (after, is_living) == ((server(),), True)


@pytest.mark.parametrize(
    ("known", "is_living"),
    [
        (server(generation=1), True),
        (server(generation=1, state=ServerState.STALE), True),
        (server(generation=1, state=ServerState.DEAD), False),
        (server(generation=2), False),
        (server(generation=0), False),
    ],
)
async def test_only_the_incarnation_that_is_known_and_not_over_lives(known, is_living):
    servers = pool()
    await servers.update([known])
    assert servers.is_living(server(generation=1)) is is_living


async def test_a_second_report_of_the_same_generation_is_believed():
    servers = pool()
    await servers.update([server(generation=1)])
    await servers.update([server(generation=1, state=ServerState.DEAD)])
    assert servers.servers()[0].state is ServerState.DEAD


async def test_a_server_that_confirms_its_weights_gets_traffic_only_once_its_supervisor_has_admitted_it():
    servers = pool()
    seen = []
    await servers.update([server(state=ServerState.STALE)])
    await servers.confirm(("server-0", 0), 3)
    seen.append(servers.servers()[0].state)
    await servers.update([server(version=3)])
    await servers.mark_stale(("server-0", 0), "sent other weights")
    await servers.confirm(("server-0", 0), 4, lineage=2)
    seen.append(servers.servers()[0].state)
    confirmed = servers.servers()[0]
    await servers.update([server(generation=1, state=ServerState.STALE)])
    await servers.confirm(("server-0", 1), 4)
    states, held = [*seen, servers.servers()[0].state], (confirmed.weight_version, confirmed.lineage)
    assert states == [ServerState.STALE, ServerState.READY, ServerState.STALE]
    assert held == (4, 2)


@pytest.mark.parametrize("over", sorted(server_pool.OVER))
async def test_one_that_is_over_is_not_brought_back_by_late_news(over):
    servers = pool()
    await servers.update([server(state=over)])
    await servers.confirm(("server-0", 0), 0)
    await servers.mark_stale(("server-0", 0), "late")
    await servers.suspect(("server-0", 0), "late")
    assert servers.servers()[0].state is over
    await assert_none_is_leased(servers, 0)


async def test_only_a_ready_server_is_suspected():
    servers = pool()
    await servers.update([server(state=ServerState.STALE)])
    await servers.suspect(("server-0", 0), "reset")
    assert servers.servers()[0].state is ServerState.STALE


async def test_requests_of_an_end_are_moved_after_a_while_and_those_of_others_are_not(monkeypatch):
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.02)
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    answered = asyncio.Event()

    async def ask():
        async with turn(servers):
            return await answered.wait()

    first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
    await asyncio.sleep(0)
    await servers.update([server(state=ServerState.DEAD)])
    async with asyncio.timeout(HOLD_S):
        with pytest.raises(RequestMoved):
            await first
    answered.set()
    assert (await second, servers.in_flight()) == (True, {"server-0": 0, "server-1": 0})


async def test_room_is_counted_in_samples_over_all_servers():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    await servers.limit(6)
    async with servers.acquire(0, samples=2), servers.acquire(0, samples=4):
        waiting = asyncio.create_task(leased(servers, 0, samples=1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done(), "six of six are in flight"
        await servers.limit(7)
        assert await waiting in {"server-0", "server-1"}


async def test_a_server_that_becomes_ready_wakes_who_waits_for_one():
    servers = pool()
    waiting = asyncio.create_task(leased(servers, 0))
    await asyncio.sleep(0)
    await servers.update([server()])
    assert await waiting == "server-0"


async def test_an_answer_of_a_server_that_lives_is_waited_for():
    servers = pool()
    await servers.update([server()])
    answer = asyncio.Event()
    asking = asyncio.create_task(servers.unless_ended(server(), answer.wait()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asking.done()
    answer.set()
    assert (await asking, asyncio.all_tasks() - {asyncio.current_task()}) == (True, set())


async def test_requests_of_a_server_that_lives_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.0)
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    async with turn(servers) as first, servers.acquire(0):
        assert first.name == "server-0"
        await servers.update([server(), server("server-1", 1, state=ServerState.DEAD)])
        await servers.update([server()])
        await all_turns()
        assert servers.in_flight() == {"server-0": 1, "server-1": 1}


async def test_a_server_that_leaves_gets_nothing_new_and_waits_for_its_own_requests_only():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    async with servers.acquire(0) as first, servers.acquire(0) as second:
        assert (first.name, second.name) == ("server-0", "server-1")
        leaving = asyncio.create_task(servers.drain("server-0", within_s=HOLD_S))
        await asyncio.sleep(0)
        assert servers.servers()[0].state is ServerState.STOPPED
        for _ in range(5):
            await asyncio.sleep(0)
        assert not leaving.done()
        in_flight = servers.in_flight()
        waits = asyncio.create_task(_released(servers, leaving))
    assert (in_flight, await waits) == ({"server-0": 1, "server-1": 1}, 0)


async def _released(servers, leaving):
    async with asyncio.timeout(HOLD_S):
        return await leaving


async def test_a_request_of_one_that_left_is_still_counted_until_it_ends(monkeypatch):
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.01)
    servers = pool()
    await servers.update([server()])
    async with servers.acquire(0), servers.acquire(0):
        await servers.drain("server-0", within_s=0.0)
        during = servers.in_flight()
    assert (during, servers.in_flight()) == ({"server-0": 2}, {})
