"""Probes of suspects, and what is given back when a request ends."""

import asyncio
import dataclasses

from actors.rollout import server_pool
from launcher.base.messages import ServerState
from tests.unit.actors.rollout.test_server_pool import HOLD_S, assert_none_is_leased, leased, pool, server


async def test_each_request_is_busy_time_of_its_server_and_its_samples_are_free_again():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    await leased(servers, 0, samples=9)
    async with servers.acquire(0, samples=1) as one:
        tracked = servers.throughput._servers["server-0"].requests
        async with servers.acquire(0, samples=5) as other:
            async with servers.acquire(0, samples=1):
                pass
            async with servers.acquire(0, samples=1) as third:
                pass
    assert (one.name, other.name, third.name) == ("server-0", "server-1", "server-0")
    assert (tracked, servers.throughput._servers["server-0"].requests) == (1, 0)


async def test_a_pool_that_closes_leaves_no_probe_behind():
    servers = pool(answers=[None])
    await servers.update([server()])
    await servers.suspect("server-0", "reset")
    await asyncio.sleep(0)
    async with asyncio.timeout(HOLD_S):
        await servers.close()
    assert (asyncio.all_tasks() - {asyncio.current_task()}) == set()


async def test_a_suspect_that_does_not_answer_stays_one_and_is_asked_at_intervals(monkeypatch):
    monkeypatch.setattr(server_pool, "PROBE_INTERVAL_S", 0.01)
    asked = []

    async def probe(url):
        asked.append(url)
        return None if len(asked) < 3 else 0

    servers = server_pool.ServerPool(probe)
    await servers.update([server()])
    await servers.suspect("server-0", "reset")
    for _ in range(20):
        await asyncio.sleep(0)
    early = len(asked), servers.servers()[0].state
    await leased(servers, 0)
    assert (early, len(asked)) == ((1, ServerState.SUSPECT), 3)


async def test_an_answer_that_comes_after_other_news_of_a_suspect_changes_nothing():
    late = asyncio.get_running_loop().create_future()

    async def probe(url):
        return await late

    servers = server_pool.ServerPool(probe)
    await servers.update([server()])
    await servers.suspect("server-0", "reset")
    await asyncio.sleep(0)
    await servers.update([server(state=ServerState.STALE)])
    late.set_result(7)
    for _ in range(5):
        await asyncio.sleep(0)
    assert servers.servers()[0] == server(state=ServerState.STALE)


async def test_a_parked_server_gets_each_version_and_no_traffic_until_it_is_promoted():
    servers = pool()
    parked = server(state=ServerState.PARKED)
    await servers.update([parked])
    for version in (1, 2):
        await servers.mark_stale("server-0", "loading")
        await servers.confirm("server-0", version)
        assert servers.servers()[0].state is ServerState.PARKED
        await assert_none_is_leased(servers, version)
    await servers.mark_stale("server-0", "loading")
    await assert_none_is_leased(servers, 2)
    await servers.confirm("server-0", 3)
    await servers.update([dataclasses.replace(servers.servers()[0], state=ServerState.READY)])
    assert await leased(servers, 3) == "server-0"
    await servers.mark_stale("server-0", "loading")
    await servers.confirm("server-0", 4)
    assert await leased(servers, 4) == "server-0", "from then on it is as any other"
