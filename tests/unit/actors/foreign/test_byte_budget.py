"""The room for bodies of requests: who waits for it, and in which order it is given."""

import asyncio
import contextlib

from actors.foreign.door_http import ByteBudget
from tests.support.worlds.door import until


async def test_bodies_beyond_the_budget_wait_and_a_larger_one_goes_alone():
    budget, order = ByteBudget(10), []

    async def hold(size, release):
        async with budget.take_room(size):
            order.append(size)
            await release.wait()

    releases = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(hold(*one)) for one in zip((6, 5, 20), releases, strict=True)]
    for expected, release in zip(([6], [6, 5], [6, 5, 20]), releases, strict=True):
        await until(lambda expected=expected: order == expected)
        release.set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert order == [6, 5, 20]


async def test_one_that_gives_up_while_its_body_waits_for_room_makes_way_for_the_next():
    budget = ByteBudget(10)

    async def hold(size):
        async with budget.take_room(size):
            return size

    async with budget.take_room(8):
        first, second = (asyncio.create_task(hold(size)) for size in (5, 2))
        await asyncio.sleep(0)
        assert not second.done(), "in order of arrival"
        first.cancel()
        assert await second == 2
    assert await hold(20) == 20, "nothing is left of the one that gave up"
