"""The traps of the proxy: what they change on the way, and what counts as met."""

import aiohttp
from aiohttp import web

from scripts.faults.fault_proxy import FaultProxy, Spoil


async def test_a_busy_server_says_503_to_health_and_generates():
    async def answer(request):
        return web.Response(text="made")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    target = f"http://127.0.0.1:{runner.addresses[0][1]}"
    spoil = Spoil()
    async with FaultProxy(target, seed=1, spoil=lambda: spoil) as proxy, aiohttp.ClientSession() as client:

        async def ask(path):
            async with client.get(proxy.url + path) as answer:
                return answer.status

        before = await ask("/generate"), await ask("/health"), dict(proxy.fired)
        spoil = Spoil(busy=True)
        during = await ask("/generate"), await ask("/health"), dict(proxy.fired)
    await runner.cleanup()
    assert before == (200, 200, {})
    assert during == (200, 503, {"generates while busy": 1, "busy": 1})
