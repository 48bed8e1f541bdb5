"""A proxy in front of a server that spoils a seeded share of the generations passing through (fault C8)."""

from __future__ import annotations

import random
from collections import Counter

import aiohttp
from aiohttp import web

EMPTY = (
    b'data: {"index": 0, "text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}, '
    b'"weight_version": "0", "output_token_logprobs": []}}\n\ndata: [DONE]\n\n'
)
KINDS = ("reset", "500", "503", "truncated", "empty")


class FaultProxy:
    """`async with FaultProxy(url, share=0.2, seed=1) as proxy:` serves at `proxy.url`; `proxy.fired` counts."""

    def __init__(self, target: str, *, share: float, seed: int) -> None:
        self._target = target
        self._share = share
        self._random = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.requests = 0

    async def __aenter__(self) -> FaultProxy:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        kind = self._draw() if request.path == "/generate" else None
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind in {"500", "503"}:
            return web.Response(status=int(kind), text="spoiled")
        if kind == "empty":
            return web.Response(body=EMPTY, content_type="text/event-stream")
        async with self._session.request(
            request.method,
            self._target + request.path,
            data=await request.read(),
            headers={"Content-Type": "application/json"},
        ) as answer:
            body = await answer.read()
        if kind == "truncated":
            return await self._half(request, body)
        return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    async def _half(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    def _draw(self) -> str | None:
        self.requests += 1
        if self._random.random() >= self._share:
            return None
        kind = self._random.choice(KINDS)
        self.fired[kind] += 1
        return kind
