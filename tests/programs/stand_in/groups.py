"""A server's side of a torch.distributed group over gloo, as SGLang makes it, for the stand-in server."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta
from math import prod
from typing import Any

from aiohttp import web

SERVERS_OWN = timedelta(minutes=30)
"""torch's default, which SGLang leaves as it is."""


class StandInGroups:
    """`received`: of each update so far, its names and the sha256 of its bytes. torch is imported at the first use."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self.received: list[tuple[list[str], str]] = []

    async def join(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._groups[body["group_name"]] = await asyncio.to_thread(_join, body)
        return web.json_response({"success": True, "message": "Succeeded"})

    async def update(self, body: dict) -> web.Response | None:
        """An answer where the group breaks."""
        assert body["load_format"] == "flattened_bucket"
        try:
            received = await asyncio.to_thread(_receive, self._groups[body["group_name"]], body)
        except RuntimeError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.received.append((body["names"], received))
        return None

    async def told(self, _: web.Request) -> web.Response:
        return web.json_response(self.received)


def _join(body: dict) -> Any:
    import torch.distributed as dist

    name = body["group_name"]
    assert body["backend"] == "cpu:gloo"
    store: dist.Store = dist.TCPStore(
        body["master_address"], body["master_port"], is_master=False, timeout=SERVERS_OWN, wait_for_workers=False
    )
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], SERVERS_OWN)


def _receive(group: Any, body: dict) -> str:
    import torch
    import torch.distributed as dist

    sizes = (
        prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
    )
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([flat], options).wait()
    return hashlib.sha256(flat.numpy()).hexdigest()
