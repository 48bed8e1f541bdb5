"""The pool gives leases to servers that are READY at the right weights, and to no other."""

import asyncio
import dataclasses

import pytest

from actors.rollout import server_pool
from actors.rollout.server_pool import PrefixAffinity, RequestMoved
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import TensorTransport
from launcher.base.errors import ServerError
from launcher.base.messages import ServerState
from tests.support.machine import all_turns
from tests.support.worlds.rollout import HOLD_S, assert_none_is_leased, leased, pool, server, turn


async def test_the_least_busy_server_is_leased():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    async with servers.acquire(0) as first, servers.acquire(0) as second, servers.acquire(0) as third:
        assert (first.name, second.name, third.name) == ("server-0", "server-1", "server-0")


async def test_a_retry_goes_to_another_server_where_there_is_one():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    other = await leased(servers, 0, avoid="server-0")
    await servers.mark_stale(("server-1", 0), "gone")
    assert (other, await leased(servers, 0, avoid="server-0")) == ("server-1", "server-0")


@pytest.mark.parametrize("state", [s for s in ServerState if s is not ServerState.READY])
async def test_a_server_that_is_not_ready_gets_no_traffic(state):
    servers = pool()
    await servers.update([server(state=state)])
    await assert_none_is_leased(servers, 0)


async def test_a_server_with_other_weights_gets_no_traffic_until_it_confirms_them():
    servers = pool()
    await servers.update([server(version=6)])
    waiting = asyncio.create_task(leased(servers, 7))
    await asyncio.sleep(0)
    assert not waiting.done()
    await servers.confirm(("server-0", 0), 7)
    assert await waiting == "server-0"


async def test_after_a_restore_the_same_version_of_other_weights_gets_no_traffic():
    """With rollouts ahead a request may be made between a step and its publication: a server that still held what the
    restore had undone, under the number of the new version, was given it."""
    servers = pool()
    await servers.update([server(version=6)])
    await servers.confirm(("server-0", 0), 7, 1)
    publisher = WeightPublisher(servers, TensorTransport(None, tuple, tp_size=1, timeout_s=1.0))
    await publisher.begin(2)
    await assert_none_is_leased(servers, lambda: 7)
    await servers.confirm(("server-0", 0), 7, 2)
    assert await leased(servers, 7) == "server-0"


async def test_a_suspect_comes_back_when_it_says_its_version():
    servers = pool(answers=[None, 3])
    await servers.update([server(version=3)])
    await servers.suspect(("server-0", 0), "reset")
    assert servers.servers()[0].state is ServerState.SUSPECT
    name = await leased(servers, 3)
    await servers.close()
    assert name == "server-0"


async def test_a_suspect_that_lost_its_weights_gets_no_traffic():
    servers = pool(answers=[2])
    await servers.update([server(version=3)])
    await servers.suspect(("server-0", 0), "reset")
    await assert_none_is_leased(servers, 3)
    assert (servers.servers()[0].state, servers.servers()[0].weight_version) == (ServerState.READY, 2)
    await servers.close()


async def test_an_older_generation_is_not_believed():
    servers = pool()
    await servers.update([server(generation=2)])
    await servers.update([server(generation=1, state=ServerState.DEAD)])
    assert servers.servers()[0].generation == 2


async def test_a_lease_is_given_back_when_its_request_fails():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    with pytest.raises(ValueError):
        async with servers.acquire(0):
            raise ValueError
    assert await leased(servers, 0) == "server-0"


async def test_a_limit_holds_requests_back_until_others_have_ended():
    """Also those that were waiting for a server when it was set."""
    servers = pool()
    order = []

    async def ask(name, samples, ends):
        async with servers.acquire(0, samples=samples):
            order.append(name)
            await ends.wait()

    first, second, third = (asyncio.Event() for _ in range(3))
    tasks = [asyncio.create_task(ask(*one)) for one in (("a", 4, first), ("b", 4, second), ("c", 20, third))]
    await asyncio.sleep(0)
    await servers.limit(8)
    await servers.update([server("server-0", 0)])
    while len(order) < 2:
        await asyncio.sleep(0)
    first.set()
    second.set()
    third.set()
    await asyncio.gather(*tasks)
    in_flight = servers.in_flight()
    assert order == ["a", "b", "c"], "what is larger than the limit goes alone"
    assert in_flight == {"server-0": 0}


async def test_a_lower_limit_lets_fewer_in():
    servers = pool()
    await servers.update([server("server-0", 0)])
    await servers.limit(4)
    async with servers.acquire(0, samples=4):
        waiting = asyncio.create_task(leased(servers, 0, samples=1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == "server-0"


# ── affinity ──


async def test_a_prompt_comes_back_to_the_server_that_has_its_prefix_and_not_after_new_weights_or_a_restart():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    async with servers.acquire(0, samples=2):  # server-0 is busy: the prompt goes to the other
        first = await leased(servers, 0, prompt="p", samples=2)
    async with (
        servers.acquire(0, samples=1, prompt="q"),
        servers.acquire(0, samples=1),
        servers.acquire(0, samples=1),
    ):
        again = await leased(servers, 0, prompt="p", samples=2)
    async with servers.acquire(0, samples=1, prompt="p"):  # its home has one in flight, the other none
        await servers.confirm(("server-0", 0), 1)
        await servers.confirm(("server-1", 0), 1)
        after_update = await leased(servers, 1, prompt="p")
    await servers.update([server("server-1", 1, generation=1, version=1)])
    among_equals = await leased(servers, 1, prompt="p")
    assert (first, again, after_update, among_equals) == ("server-1", "server-1", "server-0", "server-0")


async def test_what_an_earlier_life_has_in_flight_is_no_load_of_the_next_and_is_not_given_back_to_it():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    async with servers.acquire(0, samples=9) as old, servers.acquire(0, samples=8):
        assert old.name == "server-0"
        await servers.update([server("server-0", 0, generation=1)])
        async with servers.acquire(0, samples=8) as first:
            second = await leased(servers, 0, samples=1)
    assert (first.name, second, servers.in_flight()) == ("server-0", "server-0", {"server-0": 0, "server-1": 0})


# ── leaving ──


async def test_a_server_that_leaves_ends_what_it_is_at_and_is_forgotten():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    answered = asyncio.Event()

    async def ask():
        async with turn(servers) as leased_one:
            return await answered.wait(), leased_one.name

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    leaving = asyncio.create_task(servers.drain("server-0", within_s=HOLD_S))
    await asyncio.sleep(0)
    others = {await leased(servers, 0) for _ in range(3)}
    assert not leaving.done()
    answered.set()
    assert (await asking, others, await leaving) == ((True, "server-0"), {"server-1"}, 0)
    assert ([one.name for one in servers.servers()], servers.in_flight()) == (["server-1"], {"server-1": 0})


async def test_what_a_leaving_server_does_not_end_in_time_moves():
    servers = pool()
    await servers.update([server("server-0", 0), server("server-1", 1)])
    cancelled = []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def ask():
        async with turn(servers):
            await never()

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    moved = await servers.drain("server-0", within_s=0.01)
    with pytest.raises(RequestMoved):
        await asking
    await servers.suspect(("server-0", 0), "late word of one that left")
    await servers.mark_stale(("server-0", 0), "late word of one that left")
    await servers.confirm(("server-0", 0), 0)
    assert (moved, cancelled, [one.name for one in servers.servers()]) == (1, [True], ["server-1"])


# ── a life that is over ──


async def test_what_a_process_that_was_ended_breaks_off_by_itself_is_waited_for():
    """What has come of an answer until then counts; a request that was taken away from it would lose that."""
    servers = pool()
    await servers.update([server()])
    breaks = asyncio.Event()

    async def ask():
        async with turn(servers):
            await breaks.wait()
            return "what has come"

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    await servers.update([server(state=ServerState.DEAD)])
    await all_turns()
    assert not asking.done()
    breaks.set()
    assert await asking == "what has come"


@pytest.mark.parametrize("word", [server(state=ServerState.DEAD), server(generation=1, state=ServerState.STALE)])
async def test_nobody_waits_for_a_life_that_is_over_nor_brings_it_back(word):
    servers = pool()
    await servers.update([server(state=ServerState.STALE)])
    asking = asyncio.create_task(servers.unless_ended(server(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    await servers.update([word])
    async with asyncio.timeout(HOLD_S):
        with pytest.raises(ServerError, match="ended before it answered"):
            await asking
    with pytest.raises(ServerError, match="ended meanwhile"):
        await servers.update_if_alive(server())
    assert servers.servers() == (word,)


async def test_a_life_that_nobody_has_told_of_yet_is_not_over():
    servers = pool()
    await servers.update([server(state=ServerState.DEAD)])
    fresh = server(generation=1)
    assert await servers.unless_ended(fresh, asyncio.sleep(0, "an answer")) == "an answer"
    await servers.update_if_alive(fresh)
    assert servers.servers() == (server(generation=1),)


async def test_a_request_that_does_not_let_go_holds_up_no_drain(monkeypatch):
    """The second wait had no deadline: the server was never forgotten, and whoever drained it waited for ever."""
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.05)
    servers = pool()
    await servers.update([server()])
    async with servers.acquire(0):
        moved = await asyncio.wait_for(servers.drain("server-0", within_s=0.01), HOLD_S)
        assert (moved, servers.servers()) == (1, ())


ASKED = server("server-0", version=3)


def test_home_is_the_last_that_was_asked_and_no_other():
    affinity = PrefixAffinity()
    assert affinity.home("p") == ""
    affinity.asked("p", ASKED)
    assert (affinity.home("p"), affinity.home("q")) == (ASKED.name, "")
    affinity.asked("p", dataclasses.replace(ASKED, name="server-1"))
    assert affinity.home("p") == "server-1"


def test_warm_is_the_same_incarnation_at_the_same_weights():
    affinity = PrefixAffinity()
    affinity.asked("p", ASKED)
    assert affinity.is_warm("p", ASKED)
    for change in ({"generation": 1}, {"weight_version": 4}, {"lineage": 7}, {"name": "server-1"}):
        assert not affinity.is_warm("p", dataclasses.replace(ASKED, **change))
    affinity.asked("", ASKED)
    assert not affinity.is_warm("", ASKED)


def test_the_prompt_that_was_asked_least_lately_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(server_pool, "MOST_PROMPTS", 2)
    affinity = PrefixAffinity()
    for prompt in ("a", "b", "a"):
        affinity.asked(prompt, ASKED)
    assert all(affinity.home(prompt) == ASKED.name for prompt in "ab")
    affinity.asked("c", ASKED)
    assert [affinity.home(prompt) == ASKED.name for prompt in "abc"] == [True, False, True]
