"""Probes of suspects, and what is given back when a request ends."""

import asyncio

from actors.rollout import server_pool
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.worlds.rollout import HOLD_S, leased, pool, server


async def test_the_samples_of_each_request_are_free_again():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    await leased(servers, 0, samples=9)
    async with servers.acquire(0, samples=1) as one, servers.acquire(0, samples=5) as other:
        async with servers.acquire(0, samples=9):
            pass
        async with servers.acquire(0, samples=1) as third:
            pass
    assert (one.name, other.name, third.name) == ("server-0", "server-1", "server-0")


async def test_a_pool_that_closes_leaves_no_probe_behind():
    servers = pool(answers=[None])
    await servers.update([server()])
    await servers.suspect(("server-0", 0), "reset")
    await asyncio.sleep(0)
    async with asyncio.timeout(HOLD_S):
        await servers.close()
    assert (asyncio.all_tasks() - {asyncio.current_task()}) == set()


async def test_a_suspect_that_does_not_answer_stays_one_and_is_asked_at_intervals(monkeypatch):
    monkeypatch.setattr(server_pool, "PROBE_INTERVAL_S", scaled(0.2))
    asked = []

    async def probe(url):
        asked.append(url)
        return None if len(asked) < 3 else 0

    servers = server_pool.ServerPool(probe)
    await servers.update([server()])
    await servers.suspect(("server-0", 0), "reset")
    while not asked:
        await asyncio.sleep(0)
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
    await servers.suspect(("server-0", 0), "reset")
    await asyncio.sleep(0)
    await servers.update([server(state=ServerState.STALE)])
    late.set_result(7)
    for _ in range(5):
        await asyncio.sleep(0)
    assert servers.servers()[0] == server(state=ServerState.STALE)


async def in_turn(servers, *news):
    """All of `news` arrives while another is being taken."""
    async with servers._changed:
        tasks = []
        for one in news:
            tasks.append(asyncio.create_task(one))
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def test_what_is_known_when_its_turn_comes_decides_and_not_what_was_when_it_was_told():
    """A server that had died a moment before was READY again by the confirmation that came just after."""
    dead, of_now = server(state=ServerState.DEAD), server(generation=1, state=ServerState.STALE)
    for first, then, now in (
        (lambda pool: pool.update([dead]), lambda pool: pool.confirm(("server-0", 0), 1), dead),
        (lambda pool: pool.update([dead]), lambda pool: pool.mark_stale(("server-0", 0), "loading"), dead),
        (lambda pool: pool.update([dead]), lambda pool: pool.update_if_alive(server()), dead),
        (lambda pool: pool.update([dead]), lambda pool: pool.suspect(("server-0", 0), "reset"), dead),
        (lambda pool: pool.update([of_now]), lambda pool: pool.mark_stale(("server-0", 0), "loading"), of_now),
        (lambda pool: pool.update([of_now]), lambda pool: pool.confirm(("server-0", 0), 1), of_now),
    ):
        servers = pool()
        await servers.update([server()])
        await in_turn(servers, first(servers), then(servers))
        assert servers.servers() == (now,)
        await servers.close()


async def test_a_probe_that_is_answered_late_ends_no_doubt():
    answered = asyncio.Event()

    async def probe(url):
        await answered.wait()
        return 0

    servers = server_pool.ServerPool(probe)
    await servers.update([server()])
    await servers.suspect(("server-0", 0), "reset")
    await asyncio.sleep(0)
    async with servers._changed:
        doubting = asyncio.create_task(servers.mark_stale(("server-0", 0), "its log-probs are far"))
        await asyncio.sleep(0)
        answered.set()
        for _ in range(5):
            await asyncio.sleep(0)
    await doubting
    for _ in range(5):
        await asyncio.sleep(0)
    assert (servers.servers()[0].state, servers.servers()[0].reason) == (ServerState.STALE, "its log-probs are far")
    await servers.close()


async def test_a_server_may_be_asked_to_leave_twice_at_the_same_time():
    """A Coordinator that takes over asks again: the second question ended as a defect of the launcher's own."""
    servers = pool()
    await servers.update([server()])
    assert [
        task.result() for task in await in_turn(servers, *(servers.drain("server-0", within_s=1) for _ in range(2)))
    ] == [0, 0]
    assert servers.servers() == ()
