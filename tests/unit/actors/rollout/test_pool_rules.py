"""Rules of the pool that others count on: who is counted, who is waited for, who wakes whom, and who may stand in."""

import asyncio

import pytest

from actors.rollout import server_pool
from actors.rollout.server_pool import RequestMoved
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.worlds.rollout import HOLD_S, assert_none_is_leased, leased, pool, server, turn


async def some_turns():
    for _ in range(20):
        await asyncio.sleep(0)


async def holding(servers, ends):
    """A request that does not listen: it ends when `ends` is set."""
    async with servers.acquire(0):
        await ends.wait()


async def lives_in_flight(servers):
    """Of server-0 one request of the first incarnation and one of the second; what ends each, and their tasks."""
    ends, tasks = [], []
    for generation in (0, 1):
        await servers.update([server(generation=generation)])
        ends.append(asyncio.Event())
        tasks.append(asyncio.create_task(holding(servers, ends[-1])))
        await asyncio.sleep(0)
    return ends, tasks


# ── who may answer ──


async def test_a_server_that_its_supervisor_has_taken_back_gets_no_traffic_by_confirming():
    servers = pool()
    await servers.update([server()])
    await servers.update([server(state=ServerState.STALE)])
    await servers.confirm(("server-0", 0), 0)
    assert servers.servers()[0].state is ServerState.STALE
    await assert_none_is_leased(servers, 0)


async def test_a_server_that_is_let_in_again_is_given_to_who_waits():
    """Of one that was taken back in doubt: nothing else may wake them."""
    servers = pool()
    await servers.update([server(state=ServerState.STALE)])
    waiting = asyncio.create_task(leased(servers, 0))
    await some_turns()
    await servers.update_if_alive(server())
    assert await waiting == "server-0"


@pytest.mark.parametrize(
    ("others", "has_other"),
    [
        ([], False),
        ([server("server-1", 1)], True),
        ([server("server-1", 1, state=ServerState.STALE)], False),
        ([server("server-1", 1, version=1)], False),
        ([server("server-1", 1), server("server-2", 2, version=1)], True),
        ([server("server-1", 1, state=ServerState.SUSPECT), server("server-2", 2)], True),
    ],
)
async def test_another_server_may_stand_in_where_it_is_ready_at_the_same_weights(others, has_other):
    servers = pool()
    await servers.update([server(), *others])
    assert servers.has_other("server-0") is has_other


async def test_nobody_stands_in_for_an_unknown_server_nor_with_weights_of_another_lineage():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    before = servers.has_other("server-0"), servers.has_other("server-2")
    await servers.confirm(("server-1", 0), 0, lineage=1)
    assert (before, servers.has_other("server-0")) == ((True, False), False)


async def test_a_prompt_goes_to_the_server_that_had_it_where_all_are_as_free_also_at_new_weights():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    async with servers.acquire(0):
        first = await leased(servers, 0, prompt="p")
    for name in ("server-0", "server-1"):
        await servers.confirm((name, 0), 1)
    again, new = await leased(servers, 1, prompt="p"), await leased(servers, 1, prompt="q")
    assert (first, again, new) == ("server-1", "server-1", "server-0")


# ── what is in flight ──


async def test_the_probe_of_a_suspect_is_a_request_of_it_until_it_is_answered_or_the_server_has_left():
    answers = asyncio.Queue()

    async def probe(url):
        return await answers.get()

    servers = server_pool.ServerPool(probe)
    await servers.update([server(), server("server-1", 1)])
    await servers.suspect(("server-0", 0), "silent")
    counts = [servers.in_flight()]
    answers.put_nowait(0)
    await some_turns()
    counts.append(servers.in_flight())
    await servers.suspect(("server-0", 0), "silent")
    await servers.drain("server-0", within_s=HOLD_S)
    counts.append(servers.in_flight())
    await servers.close()
    assert counts == [{"server-0": 1, "server-1": 0}, {"server-0": 0, "server-1": 0}, {"server-1": 0}]


# ── a server that is cleared, or leaves ──


async def test_a_server_without_requests_is_clear_at_once_and_those_of_others_stay():
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    async with turn(servers, avoid="server-0") as other:
        moved = await servers.clear("server-0", within_s=0)
        answer = await asyncio.sleep(0.01, "an answer")
    assert (other.name, moved, answer) == ("server-1", 0, "an answer")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_server_is_clear_when_the_requests_of_all_its_incarnations_have_ended(first):
    servers = pool()
    ends, tasks = await lives_in_flight(servers)
    clearing = asyncio.create_task(servers.clear("server-0", within_s=HOLD_S))
    await some_turns()
    ends[first].set()
    await some_turns()
    assert not clearing.done()
    ends[1 - first].set()
    assert await clearing == 0
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("first", [0, 1])
async def test_what_is_moved_away_is_waited_for_until_it_has_let_go(first):
    servers = pool()
    ends, tasks = await lives_in_flight(servers)
    clearing = asyncio.create_task(servers.clear("server-0", within_s=0))
    await some_turns()
    ends[first].set()
    await some_turns()
    assert not clearing.done()
    ends[1 - first].set()
    assert await clearing == 2
    await asyncio.gather(*tasks)


async def test_a_request_that_is_moved_has_ended_at_its_server_when_it_asks_another():
    """Weights are loaded when the requests of a server are given back: none may still be open there."""
    servers = pool()
    await servers.update([server()])
    story = []

    async def is_aborted():
        try:
            await asyncio.Event().wait()
        finally:
            await some_turns()
            story.append("aborted")

    async def ask():
        try:
            async with turn(servers):
                await is_aborted()
        except RequestMoved:
            story.append("moved")

    asking = asyncio.create_task(ask())
    await some_turns()
    await servers.clear("server-0", within_s=0)
    await asking
    assert story == ["aborted", "moved"]


async def hold_turn(servers, answered):
    async with turn(servers):
        await answered.wait()


@pytest.mark.parametrize("within_s", [0.0, 0.001])
async def test_one_that_is_being_given_back_is_moved_no_more(within_s):
    """Who waited for its place was told nothing, until another request ended."""
    servers = pool()
    await servers.update([server()])
    answered = asyncio.Event()
    asking = asyncio.create_task(hold_turn(servers, answered))
    await some_turns()
    async with servers._changed:  # as whoever is woken has it for a moment
        if within_s:
            servers._move({("server-0", 0)}, within_s)
        answered.set()
        await some_turns()
        servers._move({("server-0", 0)})
        await asyncio.sleep(2 * within_s)
    await asking


async def test_one_that_is_cancelled_while_it_is_given_back_wakes_who_waits_for_its_place():
    """As that of a client of the door that goes away: nobody else may end a request after it."""
    servers = pool()
    await servers.update([server()])
    await servers.limit(1)
    answered = asyncio.Event()
    asking = asyncio.create_task(hold_turn(servers, answered))
    await some_turns()
    waiting = asyncio.create_task(hold_turn(servers, answered))
    await some_turns()
    async with servers._changed:  # as whoever is woken has it for a moment
        answered.set()
        await some_turns()
        asking.cancel()
        await some_turns()
    async with asyncio.timeout(scaled(5.0)):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_request_that_comes_after_a_server_was_cleared_stays_there(monkeypatch):
    """Also where one from before has not let go."""
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.01)
    servers = pool()
    await servers.update([server()])
    async with servers.acquire(0):
        moved = await servers.clear("server-0", within_s=0)
        async with turn(servers):
            answer = await asyncio.sleep(0.01, "an answer")
    assert (moved, answer) == (1, "an answer")


async def test_a_server_that_was_started_anew_while_it_left_stays_known():
    servers = pool()
    await servers.update([server()])
    ends = asyncio.Event()
    asking = asyncio.create_task(holding(servers, ends))
    await some_turns()
    leaving = asyncio.create_task(servers.drain("server-0", within_s=HOLD_S))
    await some_turns()
    await servers.update([server(generation=1)])
    ends.set()
    await asyncio.gather(asking, leaving)
    assert servers.servers() == (server(generation=1),)
    assert await leased(servers, 0) == "server-0"


async def test_news_of_another_server_does_not_cut_short_the_time_that_a_leaving_one_has_for_its_requests(monkeypatch):
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.0)
    servers = pool()
    await servers.update([server(), server("server-1", 1)])
    async with turn(servers) as one:
        leaving = asyncio.create_task(servers.drain("server-0", within_s=HOLD_S))
        await some_turns()
        await servers.update([server("server-1", 1)])
        answer = await asyncio.sleep(0.01, "an answer")
    assert (one.name, answer, await leaving) == ("server-0", "an answer", 0)
