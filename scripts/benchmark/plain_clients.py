"""The least that a client can do to have completions from a server: no retry, no check, no pool, no reward.

What is asked is the same for all, and what the trainer needs: each token with its log-prob. They differ in how much
goes into one request, and in what carries it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

KEEP_ALIVE_S = 4.0
"""The server closes a connection that was idle for 5 s."""

Asked = Mapping[str, object]
"""SGLang's `sampling_params`."""

Client = Callable[[str, Sequence[Sequence[int]], int, Asked], Coroutine[Any, Any, int]]
"""(url, prompts' token ids, samples of each, sampling) → tokens generated."""


def request_body(input_ids: object, sampling: Asked) -> bytes:
    return orjson.dumps({"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True})


def tokens_in(answer: bytes) -> int:
    """Of one completion, or of a list of them."""
    found: Any = orjson.loads(answer)
    return sum(len(one["output_ids"]) for one in (found if isinstance(found, list) else [found]))


class AiohttpClient:
    """One session of aiohttp with no limit of connections, which are kept and used again."""

    def __init__(self, api_key: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {api_key}"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def one_by_one(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Asked) -> int:
        """A request for each sample, all at once."""
        bodies = [request_body(ids, sampling) for ids in prompts for _ in range(n)]
        return sum(await asyncio.gather(*(self._post(url, body) for body in bodies)))

    async def one_each(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Asked) -> int:
        """A request for each prompt, with all its samples."""
        bodies = [request_body([ids] * n, sampling) for ids in prompts]
        return sum(await asyncio.gather(*(self._post(url, body) for body in bodies)))

    async def one_for_all(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Asked) -> int:
        """One request with every sample as a prompt of its own."""
        return await self._post(url, request_body([ids for ids in prompts for _ in range(n)], sampling))

    async def one_with_n(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Asked) -> int:
        """One request with every prompt once and SGLang's own `n`."""
        return await self._post(url, request_body(list(prompts), {**sampling, "n": n}))

    async def _post(self, url: str, body: bytes) -> int:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url + "/generate", data=body, headers=headers) as response:
            return tokens_in(await response.read())


class RawConnection(asyncio.Protocol):
    """One HTTP/1.1 connection by hand: one request at a time, an answer is what Content-Length says."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: Any = None
        self._used = time.monotonic()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0 or self._answer is None:
            return
        head = bytes(self._received[:head_end]).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(self._received) >= head_end + 4 + length:
            body = bytes(self._received[head_end + 4 :])
            self._received.clear()
            self._answer.set_result(body)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        self._used = time.monotonic()
        return self._answer

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing() and time.monotonic() - self._used < KEEP_ALIVE_S

    def close(self) -> None:
        self._transport.close()


class RawClient:
    """As `AiohttpClient.one_by_one`, without an HTTP library."""

    def __init__(self, api_key: str) -> None:
        self._authorization = f"Authorization: Bearer {api_key}\r\n"
        self._connections: list[RawConnection] = []

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def one_by_one(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Asked) -> int:
        place = urlsplit(url)
        assert place.hostname is not None and place.port is not None
        head = f"POST /generate HTTP/1.1\r\nHost: {place.netloc}\r\n{self._authorization}"
        head += "Content-Type: application/json\r\nContent-Length: "
        bodies = [request_body(ids, sampling) for ids in prompts for _ in range(n)]
        for connection in [connection for connection in self._connections if not connection.usable]:
            connection.close()
            self._connections.remove(connection)
        loop = asyncio.get_running_loop()
        while len(self._connections) < len(bodies):
            _, connection = await loop.create_connection(RawConnection, place.hostname, place.port)
            self._connections.append(connection)
        asked = [
            connection.ask(f"{head}{len(body)}\r\n\r\n".encode() + body)
            for connection, body in zip(self._connections, bodies, strict=False)
        ]
        return sum(map(tokens_in, await asyncio.gather(*asked)))
