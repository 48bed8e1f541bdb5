"""The addresses that another project's trainer asks, as if each were an SGLang server: HTTP for DoorRequests.

A client of several servers is given several addresses; all of them are the same door. Bodies that wait are in memory:
beyond MOST_BYTES further ones are read from their sockets when others have been answered, and nobody is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import orjson
from aiohttp import web

from actors.foreign.door_requests import JSON, DoorRequests, Reply
from actors.foreign.door_servers import DoorServers
from actors.foreign.kept_weights import KeptWeights
from launcher.base.errors import WeightsRefused
from launcher.base.wording import in_one_line

MOST_BYTES = 2**30
UNKNOWN_BYTES = 2**20
"""Counted for a body whose length is not told before."""
MOST_DIGITS = 308
"""Of an integer in JSON. No double holds one with more; of 4,301 Python's reader makes an error, and a server a 500."""
LONG = re.compile(rb"\d{%d}" % (MOST_DIGITS + 1))
ANY_ADDRESS = frozenset({"/abort_request", "/flush_cache"})
ORDERS = ANY_ADDRESS | {
    *("/health", "/health_generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk")
}
"""They wait for no room: what waits for a server, and holds the room, may wait for one of these."""
ONLY_FROM_DISK = frozenset(
    {
        *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"),
        *("/update_weights_from_tensor", "/update_weights_from_ipc", "/load_lora_adapter", "/unload_lora_adapter"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
)
TOLD = (
    "the launcher's servers take weights by /update_weights_from_disk alone: a server that is restarted can't rejoin a "
    "process group, and what it was sent otherwise is lost with it. Set the trainer's weight update to disk (AReaL: "
    "actor.weight_update_mode=disk)"
)


class _Digits(str):
    """An integer of JSON, as it is written."""


def endless_number(body: bytes) -> str:
    """Why no server could read this body: an integer with too many digits, by its field; "" where there is none."""
    if LONG.search(body) is None:
        return ""
    with contextlib.suppress(ValueError, RecursionError):  # it is no JSON: its handler says so
        for place, one in _places(json.loads(body, parse_int=_Digits)):
            if isinstance(one, _Digits) and (count := len(one.lstrip("-"))) > MOST_DIGITS:
                where = in_one_line(place, longest=100) or "the body"
                return f"{where}: a number of {count:,} digits; at most {MOST_DIGITS} are read"
    return ""  # they are digits of a text


def _places(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Each value in it, with its keys: `sampling_params.stop[1]`."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _places(inner, f"{place}.{key}" if place else key)
        case list():
            for index, inner in enumerate(value):
                yield from _places(inner, f"{place}[{index}]")
        case _:
            yield place, value


class ByteBudget:
    """Waits, in order of arrival, until so many bytes are free. One that is larger than all goes alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._turn = asyncio.Lock()  # it wakes in the order of arrival
        self._released = asyncio.Event()

    @asynccontextmanager
    async def take_room(self, size: int) -> AsyncIterator[None]:
        async with self._turn:
            while self._taken and self._taken + size > self._most:
                self._released.clear()
                await self._released.wait()
            self._taken += size
        try:
            yield
        finally:
            self._taken -= size
            self._released.set()


class DoorHttp:
    """`open` listens; `told` is called once for each kind of request that can't be served."""

    def __init__(
        self, servers: DoorServers, requests: DoorRequests, kept: KeptWeights, *, told: Callable[[str], None]
    ) -> None:
        self._servers = servers
        self._requests = requests
        self._kept = kept
        self._told = told
        self._budget = ByteBudget(MOST_BYTES)
        self._runner: web.ServerRunner | None = None
        self.addresses: list[str] = []

    async def open(self, host: str, count: int) -> None:
        """On the ports that it had before, where it had some. Raises OSError."""
        # Without an Application, whose routes and signals nobody needs here. A client that goes away takes its request
        # with it.
        loop = asyncio.get_running_loop()
        make = functools.partial(web.BaseRequest, loop=loop, client_max_size=2**40)
        server = web.Server(self._answer, request_factory=make, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        for port in self._kept.state.ports or [0] * count:
            listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
            )
            await web.SockSite(self._runner, listener).start()
            bound = listener.getsockname()[1]
            self.addresses.append(f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}")
        await self._kept.note_in_turn(ports=[int(address.rpartition(":")[2]) for address in self.addresses])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        size = request.content_length or (UNKNOWN_BYTES if request.can_read_body else 0)
        async with contextlib.nullcontext() if request.path in ORDERS else self._budget.take_room(size):
            reply = await self._reply(request, await request.read())
        return web.Response(body=reply.body, status=reply.status, headers={"Content-Type": reply.content_type})

    async def _reply(self, request: web.BaseRequest, body: bytes) -> Reply:
        path = request.path
        if refusal := endless_number(body):
            return _json({"error": {"message": refusal}}, HTTPStatus.BAD_REQUEST)
        if path in ONLY_FROM_DISK:
            self._told(path)
            return _json({"success": False, "message": f"{path}: {TOLD}"}, HTTPStatus.BAD_REQUEST)
        if path in ("/health", "/health_generate"):
            is_there = self._kept.state.serves
            return Reply(body=b"", status=HTTPStatus.OK if is_there else HTTPStatus.SERVICE_UNAVAILABLE)
        if path in ANY_ADDRESS:
            if path == "/abort_request":
                self._requests.note_abort()
            return await self._requests.tell_all(path, body)
        handle = self._handlers().get(path)
        if handle is None:
            return await self._requests.forward(request.method, request.path_qs, body)
        try:
            asked = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            return _json({"error": {"message": f"not JSON: {error}"}}, HTTPStatus.BAD_REQUEST)
        if not isinstance(asked, dict):
            return _json({"error": {"message": "not a JSON object"}}, HTTPStatus.BAD_REQUEST)
        if path not in ORDERS:
            return await handle(asked, body)
        # An order is carried out also where its client has gone: else a pause might be written down and not in force.
        return await asyncio.shield(asyncio.ensure_future(handle(asked, body)))

    def _handlers(self) -> dict[str, Callable[[dict[str, object], bytes], Awaitable[Reply]]]:
        return {
            "/generate": self._requests.generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
        }

    async def _pause(self, asked: dict[str, object], _: bytes) -> Reply:
        mode = str(asked.get("mode") or "abort")
        await self._kept.note_in_turn(paused=mode)  # a door that replaces this one is paused too
        await self._requests.pause(aborts=mode == "abort")
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, *_: object) -> Reply:
        await self._kept.note_in_turn(paused="")
        await self._requests.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, asked: dict[str, object], _: bytes) -> Reply:
        """Answered when a server holds the weights, however often one is lost meanwhile."""
        if asked.get("abort_all_requests"):
            self._requests.note_abort()
        try:
            await self._servers.update(Path(str(asked.get("model_path", ""))))
        except WeightsRefused as error:
            return _json({"success": False, "message": error.message, "num_paused_requests": 0}, HTTPStatus.BAD_REQUEST)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})


def _json(answer: dict[str, object], status: int = HTTPStatus.OK) -> Reply:
    return Reply(body=orjson.dumps(answer), status=status, content_type=JSON)
