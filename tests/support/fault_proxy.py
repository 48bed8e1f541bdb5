"""A proxy in front of a server that corrupts a seeded share of the generations that pass through it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Self

import aiohttp
from aiohttp import web

KINDS = ("reset", "500", "503", "truncated", "empty")
LARGEST_REQUEST = 2**30
EMPTY = (
    b'data: {"index": 0, "text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}, '
    b'"weight_version": "0", "output_token_logprobs": []}}\n\ndata: [DONE]\n\n'
)
"""A completed stream whose one completion holds no token."""


class FaultProxy:
    """`async with FaultProxy(url, share=0.2, seed=1) as proxy:` serves at `proxy.url`; `proxy.fired` counts.

    What it doesn't spoil passes through unchanged.
    """

    def __init__(self, target: str, *, seed: int, share: float = 0.0) -> None:
        self._target = target
        self._share = share
        self._random = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.requests = 0

    async def __aenter__(self) -> Self:
        # SGLang closes a connection that was idle for 5 s: a request on one at that moment would break off unspoiled.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_route("*", "/{path:.*}", self._pass)
        # A client that gives a request up ends it at the server too: it would generate on for nobody.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        kind = self._choose() if request.path == "/generate" else None
        if kind == "reset":
            return self._reset(request)
        if kind in {"500", "503"}:
            return web.Response(status=int(kind), text="spoiled")
        if kind == "empty":
            return web.Response(body=EMPTY, content_type="text/event-stream")
        headers = {k: v for k, v in request.headers.items() if k in {"Content-Type", "Authorization"}}
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=await request.read(), headers=headers
            ) as answer:
                if kind == "truncated":
                    return await self._half(request, await answer.read())
                return await self._hand_on(request, answer)
        except aiohttp.ClientError:
            return self._reset(request)  # the server is gone, and so must be the proxy in front of it

    def _choose(self) -> str | None:
        self.requests += 1
        if self._random.random() >= self._share:
            return None
        kind = self._random.choice(KINDS)
        self.fired[kind] += 1
        return kind

    @staticmethod
    def _reset(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    @staticmethod
    async def _hand_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """As it comes: tokens that are kept back until the last would look like a silent server's."""
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        response.content_length = answer.content_length
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        return response

    @staticmethod
    async def _half(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.close()
        return response
