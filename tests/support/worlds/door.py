"""Wait until the door shows what is awaited."""

import asyncio

from tests.support.machine import scaled


async def until(holds):
    async with asyncio.timeout(scaled(30.0)):
        while not holds():
            await asyncio.sleep(0.005)
