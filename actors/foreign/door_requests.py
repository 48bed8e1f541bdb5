"""Requests of another project's trainer: parked while no server can take them, moved where one is lost.

    request ─► (paused: waits) ─► a server with the newest weights ─► answer
                    ▲                       │ lost, silent, or loads other weights
                    └───────────────────────┘ with the tokens that had arrived, where they can be continued

How a request is asked and moved is in actors/rollout/request_loop.py, as for the launcher's own trainer.
What the trainer ordered itself, a pause or an abort, ends a completion with what there is of it, as SGLang does: its
client continues it by itself. A pause is the door's alone and no server's: a server that is restarted needs none, and
the HealthMonitor's probes are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import orjson

from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_servers import DoorServers
from actors.foreign.partial_answer import PartialAnswer, can_be_continued
from actors.rollout.request_loop import NOBODY_THERE, RequestLoop, Told
from actors.rollout.server_pool import ServerRequest
from actors.serving.completions import DONE, END, PREFIX, malformed, refusal
from actors.serving.sglang_client import RequestFailed
from launcher.base.messages import ServerInfo, ServerKey
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


NO_ANSWER: Mapping[str, HTTPStatus] = {
    "malformed": HTTPStatus.BAD_GATEWAY,
    "timeout": HTTPStatus.GATEWAY_TIMEOUT,
}
"""Failures without a status of the server's own, by their kind: what the client is answered at last."""


class RefusedByServer(Exception):
    """A server has judged the request itself, and another would say the same; or all have failed at it, repeatedly."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


@dataclass(slots=True, kw_only=True)
class DoorCounts:
    """`moved`: asked of another server, or again; `continued`: those of them that had tokens, which were kept."""

    requests: int = 0
    moved: int = 0
    continued: int = 0


class DoorRequests:
    """Used on one asyncio loop. `told`: of servers whose requests were moved, as they were silent."""

    def __init__(self, servers: DoorServers, config: RolloutConfig, told: Told) -> None:
        self.servers = servers
        self.config = config
        self._loop = RequestLoop(servers.pool, config, told)
        self.aborts = 0
        self.counts = DoorCounts()
        self.completions = CompletionCounts()

    # ── what the trainer orders ──

    async def pause(self, *, aborts: bool) -> None:
        """No request reaches a server until `resume`. Those under way end with what there is of them, or, without
        `aborts`, are cut and continued then."""
        pool = self.servers.pool
        pool.pause()
        if aborts:
            self.note_abort()
            if any(turn.server is not None for turn in pool.turns):
                await self.tell_all("/abort_request", b'{"abort_all":true}')
        await pool.clear("", within_s=ABORT_S if aborts else 0.0)

    async def resume(self) -> None:
        await self.servers.pool.resume()

    def note_abort(self) -> None:
        """The trainer has ordered an end of requests: one that a server reports is its own wish."""
        self.aborts += 1
        for turn in self.servers.pool.turns:
            if turn.request.continues:
                turn.move(0.0 if turn.server is None else ABORT_S)

    async def tell_all(self, path: str, body: bytes) -> Reply:
        """An order for every server; one that is lost has nothing that it would be for."""
        answers = await asyncio.gather(
            *(self._tell(server, path, body) for server in self.servers.pool.servers() if server.url)
        )
        return next((answer for answer in answers if answer is not None), Reply(body=b""))

    async def _tell(self, server: ServerInfo, path: str, body: bytes) -> Reply | None:
        try:
            return await self.exchange(server, method="POST", path=path, body=body, timeout_s=ABORT_S, admin=True)
        except RequestFailed:
            return None

    # ── requests ──

    async def generate(self, asked: Mapping[str, Any], body: bytes) -> Reply:
        """One request to /generate."""
        if not can_be_continued(asked):
            whole = body if not asked.get("stream") else orjson.dumps({**asked, "stream": False})
            reply = await self.forward("POST", "/generate", whole)
        else:
            completion = _Completion(self, PartialAnswer(asked, stream_interval=self.config.stream_interval))
            refused = await self._ask(completion)
            if refused is None:
                answer = completion.made.answer()
                self.completions = self.completions.plus(answer)
            reply = refused or Reply(body=orjson.dumps(answer))
        if asked.get("stream") and reply.status == HTTPStatus.OK:  # complete as it is, it is one event
            return Reply(body=PREFIX + reply.body + END + PREFIX + DONE + END, content_type="text/event-stream")
        return reply

    async def forward(self, method: str, path: str, body: bytes) -> Reply:
        """Any other request, once a server is there; one that is cut is asked again from its beginning."""
        whole = _Whole(self, method, path, body)
        refused = await self._ask(whole)
        reply = refused or whole.reply
        assert reply is not None, "it is over"
        return reply

    async def _ask(self, request: _DoorRequest) -> Reply | None:
        """Until it is over. The error that servers answered with instead, where they did."""
        self.counts.requests += 1
        try:
            await self._loop.ask(request, self.servers.newest)
        except RefusedByServer as refused:
            return refused.reply
        return None

    async def exchange(
        self, server: ServerInfo, *, method: str, path: str, body: bytes, timeout_s: float, admin: bool = False
    ) -> Reply:
        """With the API key: what takes the admin key is not a stranger's to ask, beside the orders above."""
        client = self.servers.client
        content = body or None
        async with client.exchange(method, server.url, path, timeout_s, content, admin=admin) as response:
            kind = response.headers.get("Content-Type", "")
            return Reply(body=await response.read(), status=response.status, content_type=kind)


class _DoorRequest(ServerRequest):
    """A lost server is nothing that the trainer sees: it is asked again for ever. What servers answer with an error,
    not as it should be, or not in time, is asked `rollout.request_retries` times more, and then the last error is the
    answer. So is what a server breaks off that has broken it off before and has generated since: it is not lost."""

    def __init__(self, door: DoorRequests) -> None:
        self._door = door
        self._refusals = 0
        self._refusal: Reply | None = None
        self._at_fault: ServerInfo | None = None  # that answered with something that is none
        self._has_moved = False
        self._broken_by: set[ServerKey] = set()  # since the last tokens

    async def send(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        """Raises RefusedByServer too."""
        try:
            await self._exchange(server, heard)
        except RequestFailed as failure:
            status = NO_ANSWER.get(failure.kind)
            if failure.kind in NOBODY_THERE:
                status = HTTPStatus.BAD_GATEWAY if server.key in self._broken_by else None
                self._broken_by.add(server.key)
            if status is not None:
                said = {"error": {"message": f"{server.name}: {failure.message}"}}
                self._refusal = Reply(body=orjson.dumps(said), status=status)
                self.avoid = server.name
                if failure.kind == "malformed":  # a late one may only be busy, or the client's time short
                    self._at_fault = server
            raise

    @abstractmethod
    async def _exchange(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        """As `send`."""

    def note_tokens(self) -> None:
        """Tokens have come: what failed before them does not count."""
        self._refusals = 0
        self._has_moved = False
        self._broken_by.clear()

    def _refuse(self, server: ServerInfo, reply: Reply) -> NoReturn:
        """Raises RequestFailed where another server may say something else, RefusedByServer where it would not."""
        said = reply.body[:300].decode(errors="replace")
        failure = refusal(f"a request of {server.url}", reply.status, said)
        if not failure.retryable:
            raise RefusedByServer(reply)
        self._refusal = reply
        self.avoid = server.name
        raise failure

    async def failed(self, failure: RequestFailed) -> None:
        """Raises RefusedByServer."""
        if failure.kind in NOBODY_THERE and not self._has_moved:  # its server gets no request until it answers a probe
            self._has_moved = True
            return
        refused = self._refusal
        self._refusal = None
        at_fault = self._at_fault
        self._at_fault = None
        if refused is not None:
            self._refusals += 1
            if self._refusals > self._door.config.request_retries:
                if at_fault is not None:  # the Coordinator has it answer the golden prompt, or else restarts it
                    await self._door.servers.pool.mark_stale(at_fault.key, failure.message)
                raise RefusedByServer(refused)
        await asyncio.sleep(AGAIN_S)  # else it would be asked in a circle


class _Completion(_DoorRequest):
    """One that another server can continue. It ends at the trainer's abort with what there is of it."""

    def __init__(self, door: DoorRequests, made: PartialAnswer) -> None:
        super().__init__(door)
        self.made = made
        self._aborts = door.aborts
        self._kept = 0
        self._fruitless = 0

    async def _exchange(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        request, rest, timeout_s = self.made.request(), b"", self._door.config.request_timeout
        body = orjson.dumps(request)
        async with self._door.servers.client.exchange("POST", server.url, "/generate", timeout_s, body) as response:
            if response.status != HTTPStatus.OK:
                self._refuse(server, Reply(body=await response.read(), status=response.status))
            if not request["stream"]:
                self._take_event(await response.read(), server)
            else:
                async for data in response.content.iter_any():
                    *events, rest = (rest + data).split(END)
                    if events:
                        heard()
                    for event in events:
                        self._take_event(event, server)
        if self.made.finish is None:  # a server that is lost breaks the connection
            raise malformed(server.url, f"an end that comes early, after {rest[:200]!r}")

    def _take_event(self, event: bytes, server: ServerInfo) -> None:
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
            self._refuse(server, Reply(body=orjson.dumps({"error": {"message": said.get("message", "")}}), status=code))
        before = len(self.made.tokens)
        self.made.take_event(answer, server=server.url)
        if len(self.made.tokens) > before:  # an event without any would set the count back for ever
            self.note_tokens()

    def is_over(self) -> bool:
        made, counts = self.made, self._door.counts
        is_wished = self._aborts != self._door.aborts
        self._fruitless = 0 if len(made.tokens) > self._kept else self._fruitless + 1
        self._aborts = self._door.aborts
        self._kept = len(made.tokens)
        if made.is_aborted and not is_wished and self._fruitless <= self._door.config.request_retries:
            made.cut()  # new weights were loaded
        elif made.finish is None:
            made.cut()
            if is_wished and made.tokens and made.finish is None:
                made.abort()
        if made.finish is None:
            counts.moved += 1
            counts.continued += bool(made.tokens)
        return made.finish is not None


class _Whole(_DoorRequest):
    """A request whose answer is the server's own, and is begun anew where it is moved."""

    continues = False

    def __init__(self, door: DoorRequests, method: str, path: str, body: bytes) -> None:
        super().__init__(door)
        self._method = method
        self._path = path
        self._body = body
        self.reply: Reply | None = None

    async def _exchange(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        timeout_s = self._door.config.request_timeout
        reply = await self._door.exchange(
            server, method=self._method, path=self._path, body=self._body, timeout_s=timeout_s
        )
        if reply.status >= HTTPStatus.BAD_REQUEST:
            self._refuse(server, reply)
        self.reply = reply

    def is_over(self) -> bool:
        self._door.counts.moved += self.reply is None
        return self.reply is not None
