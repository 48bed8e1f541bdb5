"""A proxy that spoils nothing changes nothing."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from tests.support.fault_proxy import FaultProxy

SOON_S = 3.0
"""For what comes at once: only a test that fails waits so long."""


@asynccontextmanager
async def served_by(answer):
    """The URL of a server whose every answer is `answer`'s."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_that_closes_a_connection_at_the_next_request_is_reached_all_the_same():
    """Its close and the request cross: what every server may do with a connection that was idle for long enough."""

    async def once(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmade")
        await writer.drain()
        await reader.read(1)
        writer.close()

    async with (
        await asyncio.start_server(once, "127.0.0.1", 0) as server,
        FaultProxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seed=1) as proxy,
        aiohttp.ClientSession() as client,
    ):
        answers = []
        for _ in range(3):
            async with client.post(proxy.url + "/update_weights_from_disk") as answer:
                answers.append((answer.status, await answer.text()))
    assert answers == [(200, "made")] * 3


async def test_tokens_pass_as_they_are_made():
    is_read = asyncio.Event()

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await is_read.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with (
        served_by(answer) as target,
        FaultProxy(target, seed=1) as proxy,
        aiohttp.ClientSession() as client,
        asyncio.timeout(SOON_S),
        client.post(proxy.url + "/generate") as answered,
    ):
        first = await answered.content.readuntil(b"\n\n")
        is_read.set()
        rest = await answered.read()
    assert (answered.content_type, first, rest) == ("text/event-stream", b"data: 1\n\n", b"data: 2\n\n")


async def test_a_request_that_is_given_up_ends_at_the_server_too():
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def answer(request):
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async with served_by(answer) as target, FaultProxy(target, seed=1) as proxy, aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(proxy.url + "/generate"))
        async with asyncio.timeout(SOON_S):
            await has_begun.wait()
            asking.cancel()
            await has_ended.wait()


async def test_an_answer_that_breaks_off_at_the_server_breaks_off_at_the_client():
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.close()
        return response

    async with served_by(answer) as target, FaultProxy(target, seed=1) as proxy, aiohttp.ClientSession() as client:
        broken = ""
        try:
            async with client.post(proxy.url + "/generate") as answered:
                await answered.read()
        except aiohttp.ClientError as error:
            broken = type(error).__name__
    assert broken in ("ClientPayloadError", "ServerDisconnectedError", "ClientOSError")
