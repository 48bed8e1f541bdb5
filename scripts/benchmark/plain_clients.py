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

SamplingParams = Mapping[str, object]
"""SGLang's `sampling_params`."""

Client = Callable[[str, Sequence[Sequence[int]], int, SamplingParams], Coroutine[Any, Any, int]]
"""(url, prompts' token ids, samples of each, sampling) → tokens generated."""


def request_body(input_ids: object, sampling: SamplingParams) -> bytes:
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
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def one_by_one(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> int:
        """A request for each sample, all at once."""
        return await self._all(url, [request_body(ids, sampling) for ids in prompts for _ in range(n)])

    async def one_each(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> int:
        """A request for each prompt, with all its samples."""
        return await self._all(url, [request_body([ids] * n, sampling) for ids in prompts])

    async def one_for_all(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> int:
        """One request with every sample as a separate prompt."""
        return await self._all(url, [request_body([ids for ids in prompts for _ in range(n)], sampling)])

    async def one_with_n(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> int:
        """One request with every prompt once and SGLang's own `n`."""
        return await self._all(url, [request_body(list(prompts), {**sampling, "n": n})])

    async def _all(self, url: str, bodies: Sequence[bytes]) -> int:
        return sum(await asyncio.gather(*(self._post(url, body) for body in bodies)))

    async def _post(self, url: str, body: bytes) -> int:
        async with self._session.post(url + "/generate", data=body) as response:
            return tokens_in(await response.read())


class RawClient:
    """As `AiohttpClient.one_by_one`, without an HTTP library: an answer is what Content-Length says."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def close(self) -> None:
        for _, _, writer in self._idle:
            writer.close()

    async def one_by_one(self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> int:
        bodies = [request_body(ids, sampling) for ids in prompts for _ in range(n)]
        return sum(await asyncio.gather(*(self._post(url, body) for body in bodies)))

    async def _post(self, url: str, body: bytes) -> int:
        place = urlsplit(url)
        while self._idle:
            used, reader, writer = self._idle.pop()
            if time.monotonic() - used < KEEP_ALIVE_S:
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = f"POST /generate HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {self._api_key}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answered.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        self._idle.append((time.monotonic(), reader, writer))
        return tokens_in(answer)
