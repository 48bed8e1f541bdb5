"""Faults of the stand-in server, switched on over HTTP.

`POST /stand_in/fault {"kind": …, "path": "/generate", "times": 1, "seconds": 0}`. `kind`: refuse (no listener for
`seconds`), reset, 500, 503, 400, truncated, empty, not_json, no_logprobs, nan_logprobs, short_logprobs, no_version,
slow (answers after `seconds`). `times` null: until the next fault is set.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from aiohttp import web


class StandInFaults:
    """Which fault is on, and what it does to requests; `asked` counts these by path."""

    def __init__(self, *, compiles_s: float = 0.0) -> None:
        self.compiles_s = compiles_s
        self.asked: Counter[str] = Counter()
        self.fault: dict = {}
        self.site: web.TCPSite | None = None

    def compile(self, parameters: dict) -> None:
        """At its first use of top_p or top_k, and answers nobody meanwhile."""
        if self.compiles_s and (parameters["top_p"] < 1 or parameters["top_k"] > 0):
            print(f"compiling, for {self.compiles_s:g} s", flush=True)
            compiles_s = self.compiles_s
            self.compiles_s = 0.0
            time.sleep(compiles_s)

    async def set_fault(self, request: web.Request) -> web.Response:
        self.fault = {"path": "/generate", "times": 1, "seconds": 0.0} | await request.json()
        if self.fault["kind"] == "refuse":
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self.refuse()))
        return web.json_response({})

    async def refuse(self) -> None:
        assert self.site is not None
        runner, (host, port) = self.site._runner, self.site._runner.addresses[0][:2]
        await self.site.stop()
        await asyncio.sleep(self.fault["seconds"])
        self.site = web.TCPSite(runner, host, port, reuse_address=True)
        await self.site.start()

    def take_fault(self, path: str, kinds: set[str]) -> str | None:
        """The kind of the fault that is on for `path`, counted as used; None where there is none."""
        if self.fault.get("kind") not in kinds or self.fault["path"] != path or self.fault["times"] == 0:
            return None
        if self.fault["times"] is not None:
            self.fault["times"] -= 1
        return self.fault["kind"]

    @web.middleware
    async def misbehave(self, request: web.Request, handler) -> web.StreamResponse:
        self.asked[request.path] += 1
        match self.take_fault(request.path, {"reset", "500", "503", "400", "truncated", "not_json", "slow"}):
            case None:
                return await handler(request)
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                raise asyncio.CancelledError
            case "truncated":
                request["cut"] = True  # a stream cuts itself
                return await self.truncate(request, await handler(request))
            case "not_json":
                return web.Response(text="<html>no</html>")
            case "slow":
                await asyncio.sleep(self.fault["seconds"])
                return await handler(request)
            case status:
                return web.json_response({"error": {"message": f"fault {status}"}}, status=int(status))

    async def truncate(self, request: web.Request, whole: web.Response) -> web.StreamResponse:
        assert isinstance(whole.body, bytes)
        half = web.StreamResponse(headers={"Content-Length": str(len(whole.body))})
        await half.prepare(request)
        await half.write(whole.body[: len(whole.body) // 2])
        assert request.transport is not None
        request.transport.close()
        raise asyncio.CancelledError
