"""Requests of another project's trainer: parked while no server can take them, moved where one is lost.

    request ─► (paused: waits) ─► a server with the newest weights ─► answer
                    ▲                       │ lost, hung, or loads other weights
                    └───────────────────────┘ with the tokens that had arrived, where they can be continued

What the trainer ordered itself, a pause or an abort, ends a completion with what there is of it, as SGLang does: its
client continues it by itself. A pause is the door's alone and no server's: a server that is restarted needs none, and
the HealthMonitor's probes are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import orjson

from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_servers import DoorServers
from actors.foreign.partial_answer import PartialAnswer, can_be_continued
from actors.rollout.rollout_engine import NOBODY_THERE
from actors.rollout.server_pool import RequestMigrated
from actors.serving.completions import DONE, END, PREFIX, malformed, refusal
from actors.serving.sglang_client import RequestFailed
from launcher.base.messages import ServerInfo
from launcher.config.schema import RolloutConfig

JSON = "application/json"
ABORT_S = 5.0
"""For servers to give up what they generate; what has not ended then is cut."""
AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    body: bytes
    status: int = 200
    content_type: str = JSON


class RefusedByServer(Exception):
    """A server has judged the request itself, and another would say the same."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


Ask = Callable[[ServerInfo], Coroutine[Any, Any, Reply | None]]


class _Turn:
    """A request at a server, or waiting for one. `limit`, cut short, ends it; then `ended` is set. In the task of its
    request: a task for each turn would cost as much as the rest of the door."""

    def __init__(self, ends_at_abort: bool) -> None:
        self.limit = asyncio.timeout(None)
        self.ended = asyncio.Event()
        self.ends_at_abort = ends_at_abort
        self.is_asking = False


@dataclass(slots=True, kw_only=True)
class DoorCounts:
    """`moved`: asked of another server, or again; `continued`: those of them that had tokens, which were kept."""

    requests: int = 0
    moved: int = 0
    continued: int = 0


class DoorRequests:
    """Used on one asyncio loop."""

    def __init__(self, servers: DoorServers, config: RolloutConfig, *, paused: bool) -> None:
        self._servers = servers
        self._config = config
        self._open = asyncio.Event()
        self._turns: set[_Turn] = set()
        self.aborts = 0
        self.counts = DoorCounts()
        self.completions = CompletionCounts()
        if not paused:
            self._open.set()

    # ── what the trainer orders ──

    async def pause(self, *, aborts: bool) -> None:
        """No request reaches a server until `resume`. Those under way end with what there is of them, or, without
        `aborts`, are cut and continued then."""
        self._open.clear()
        if aborts:
            await self.abort_all()
        asking = self._asking()
        for turn in asking:
            _cut(turn.limit)
        for turn in asking:
            await turn.ended.wait()

    def _asking(self) -> list[_Turn]:
        return [turn for turn in self._turns if turn.is_asking]

    def resume(self) -> None:
        self._open.set()

    def note_abort(self) -> None:
        """The trainer has ordered an end of requests: one that a server reports is its own wish."""
        self.aborts += 1
        for turn in self._turns:
            if turn.ends_at_abort:
                _cut(turn.limit, ABORT_S if turn.is_asking else 0.0)

    async def abort_all(self) -> None:
        """Returns when the servers have ended what they generated for the trainer, or had their time."""
        self.note_abort()
        asking = self._asking()
        if not asking:
            return
        await self.tell_all("/abort_request", b'{"abort_all":true}')
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                for turn in asking:
                    await turn.ended.wait()

    async def tell_all(self, path: str, body: bytes) -> Reply:
        """An order for every server; one that is lost has nothing that it would be for."""
        answers = await asyncio.gather(
            *(self._tell(server, path, body) for server in self._servers.pool.servers() if server.url)
        )
        return next((answer for answer in answers if answer is not None), Reply(body=b""))

    async def _tell(self, server: ServerInfo, path: str, body: bytes) -> Reply | None:
        try:
            return await self._forward(server, method="POST", path=path, body=body, timeout_s=ABORT_S, admin=True)
        except RequestFailed:
            return None

    # ── requests ──

    async def generate(self, asked: Mapping[str, Any], body: bytes) -> Reply:
        """One request to /generate."""
        self.counts.requests += 1
        if not can_be_continued(asked):
            whole = body if not asked.get("stream") else orjson.dumps({**asked, "stream": False})
            reply = await self._once_there("POST", "/generate", whole)
        else:
            try:
                answer = await self._completion(asked)
                self.completions = self.completions.plus(answer)
                reply = Reply(body=orjson.dumps(answer))
            except RefusedByServer as refused:
                reply = refused.reply
        if asked.get("stream") and reply.status == HTTPStatus.OK:  # complete as it is, it is one event
            return Reply(body=PREFIX + reply.body + END + PREFIX + DONE + END, content_type="text/event-stream")
        return reply

    async def forward(self, method: str, path: str, body: bytes) -> Reply:
        """Any other request, once a server is there; one that is cut is asked again from its beginning."""
        self.counts.requests += 1
        return await self._once_there(method, path, body)

    async def _completion(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        made, fruitless = PartialAnswer(asked, stream_interval=self._config.stream_interval), 0
        while True:
            aborts, kept = self.aborts, len(made.tokens)
            with contextlib.suppress(RequestFailed):  # what had arrived counts
                await self._turn(functools.partial(self._read, made=made), ends_at_abort=True)
            fruitless = 0 if len(made.tokens) > kept else fruitless + 1
            is_wished = aborts != self.aborts
            if made.is_aborted and not is_wished and fruitless <= self._config.request_retries:
                made.cut()
            elif made.finish is None:
                made.cut()
                if is_wished and made.tokens and made.finish is None:
                    made.abort()
            if made.finish is not None:
                return made.answer()
            self.counts.moved += 1
            self.counts.continued += bool(made.tokens)

    async def _once_there(self, method: str, path: str, body: bytes) -> Reply:
        failures, timeout_s = 0, self._config.request_timeout
        ask = functools.partial(self._forward, method=method, path=path, body=body, timeout_s=timeout_s)
        while True:
            reply = None
            with contextlib.suppress(RequestFailed):
                reply = await self._turn(ask)
            if reply is not None and (reply.status < 500 or failures >= self._config.request_retries):
                return reply
            failures += reply is not None
            self.counts.moved += 1

    async def _turn(self, ask: Ask, *, ends_at_abort: bool = False) -> Reply | None:
        """Wait until requests may go to a server and one is there, and ask it. None where nothing came of it."""
        turn = _Turn(ends_at_abort)
        self._turns.add(turn)
        try:
            async with turn.limit:
                return await self._ask(ask, turn)
        except TimeoutError:
            if turn.limit.expired():
                return None
            raise
        finally:
            self._turns.discard(turn)
            turn.ended.set()

    async def _ask(self, ask: Ask, turn: _Turn) -> Reply | None:
        await self._open.wait()
        async with self._servers.acquire() as server:
            if not self._open.is_set():  # it was paused while this waited for a server
                return None
            turn.is_asking = True
            try:
                return await self._servers.pool.unless_migrated(server, ask(server))
            except RequestMigrated:
                return None
            except RequestFailed as failure:
                if failure.kind in NOBODY_THERE:
                    await self._servers.pool.suspect(server.name, failure.kind)
                else:
                    await asyncio.sleep(AGAIN_S)
                raise

    async def _forward(
        self, server: ServerInfo, *, method: str, path: str, body: bytes, timeout_s: float, admin: bool = False
    ) -> Reply:
        """With the API key: what takes the admin key is not a stranger's to ask, beside the orders above."""
        client = self._servers.client
        content = body or None
        async with client.exchange(method, server.url, path, timeout_s, content, admin=admin) as response:
            kind = response.headers.get("Content-Type", "")
            return Reply(body=await response.read(), status=response.status, content_type=kind)

    async def _read(self, server: ServerInfo, *, made: PartialAnswer) -> None:
        """Events, or the whole, into `made`. Raises RequestFailed, RefusedByServer."""
        request, rest, timeout_s = made.request(), b"", self._config.request_timeout
        body = orjson.dumps(request)
        async with self._servers.client.exchange("POST", server.url, "/generate", timeout_s, body) as response:
            if response.status != HTTPStatus.OK:
                _refuse(server, await response.read(), response.status)
            if not request["stream"]:
                _take(await response.read(), made, server)
            else:
                async for data in response.content.iter_any():
                    *events, rest = (rest + data).split(END)
                    for event in events:
                        _take(event, made, server)
        if made.finish is None:
            raise RequestFailed(f"{server.name} ended its answer early", kind="truncated")


def _take(event: bytes, made: PartialAnswer, server: ServerInfo) -> None:
    content = event.removeprefix(PREFIX)
    if content == DONE:
        return
    try:
        answer = orjson.loads(content)
        said = answer.get("error")
        code = 0 if said is None else int(said["code"])
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise malformed(server.url, f"{error!r} in {content[:200]!r}") from error
    if said is not None:
        _refuse(server, orjson.dumps({"error": {"message": said.get("message", "")}}), code)
    made.take(answer, server=server.url)


def _refuse(server: ServerInfo, body: bytes, status: int) -> NoReturn:
    failure = refusal(f"POST {server.url}/generate", status, body[:300].decode(errors="replace"))
    raise failure if failure.retryable else RefusedByServer(Reply(body=body, status=status))


def _cut(limit: asyncio.Timeout, within_s: float = 0.0) -> None:
    """End what a limit is of, unless it ends earlier."""
    at = asyncio.get_running_loop().time() + within_s
    if not limit.expired() and ((before := limit.when()) is None or at < before):
        limit.reschedule(at)
