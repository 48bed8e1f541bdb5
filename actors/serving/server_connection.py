"""One HTTP session to any number of servers: an answer is complete, or a RequestFailed with what was wrong (P1).

The session has no limit of connections (aiohttp's own 100 would throttle 256 requests in flight) and reuses them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from actors.serving.completions import malformed, refusal
from launcher.base.errors import RequestFailed
from launcher.run_files.run_keys import ServerKeys

KEEP_ALIVE_S = 4.0
"""Less than any server keeps one: to reuse one that the server is closing would look like the server's death."""


class ServerConnection:
    """Used on one asyncio loop."""

    def __init__(self, keys: ServerKeys | None = None) -> None:
        """`keys`: the run's; None sends no authorization."""
        self._headers = {} if keys is None else _authorization(keys.api)
        self._admin_headers = {} if keys is None else _authorization(keys.admin)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def _json(
        self, method: str, url: str, path: str, timeout_s: float, body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        content = await self._answer(method, url, path, timeout_s, body)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise malformed(url, f"not JSON: {content[:80]!r}") from error
        if not isinstance(answer, dict):
            raise malformed(url, f"not a JSON object: {content[:80]!r}")
        return answer

    async def _answer(
        self,
        method: str,
        url: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, object] | None = None,
        *,
        admin: bool = False,
    ) -> bytes:
        """The body of a 2xx answer."""
        async with self._response(method, url, path, timeout_s, body, admin=admin) as response:
            return await response.read()

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        url: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, object] | None = None,
        *,
        admin: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 2xx answer, to be read inside the block; what goes wrong there is a RequestFailed too."""
        content = None if body is None else orjson.dumps(body)
        async with self.exchange(method, url, path, timeout_s, content, admin=admin) as response:
            if response.status >= 400:
                said = (await response.read())[:300].decode(errors="replace").strip()
                raise refusal(f"{method} {url}{path}", response.status, said)
            yield response

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        url: str,
        path: str,
        timeout_s: float,
        content: bytes | None = None,
        *,
        admin: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of whatever status, as it comes; what goes wrong inside the block is a RequestFailed."""
        where = f"{method} {url}{path}"
        try:
            async with self._session.request(
                method,
                url + path,
                data=content,
                headers=self._admin_headers if admin else self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                yield response
        except TimeoutError as error:
            raise RequestFailed(f"{where}: no answer within {timeout_s:g} s", kind="timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed(f"{where}: {error.os_error.strerror or error}", kind="refused") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise RequestFailed(f"{where}: the connection broke off", kind="reset") from error
        except aiohttp.ClientPayloadError as error:
            raise RequestFailed(f"{where}: the answer broke off", kind="truncated") from error
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{where}: {error!r}", kind="malformed") from error


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
