"""Asks a server for what is missing of a prompt's completions, and another one too where the first falls silent.

    silent ─► SUSPECT in the pool (no new requests; it is asked for one token) ─► the same request, from the last token
    that arrived, to another server ─► the first of the two whose tokens arrive answers it; the other is aborted

Whoever is heard first wins, not whoever ends first: shorter completions would win more often. So a completion is never
made of tokens of both, but for those that were there before the silence, and a prompt never has two answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from actors.rollout.group_progress import GroupProgress
from actors.rollout.server_pool import RequestMigrated, ServerPool, Version
from actors.rollout.stream_pace import TICK_S, ServerKey, StreamPace
from actors.serving.completions import CompletionStream, Samples
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo
from launcher.config.schema import RolloutConfig
from launcher.policy.routing import silent_servers

MIGRATED = "migrated"
Told = Callable[[str, str, str], object]
"""An event, the server, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgedAnswer:
    """`samples` answer `progress.request()`. `hedged`: to how many further servers it was sent; `lost`: to how many of
    those it went."""

    server: ServerInfo
    samples: Samples
    progress: GroupProgress
    hedged: int
    lost: int


@dataclass(slots=True, eq=False)
class _Request:
    """One request on its way. `server` and `stream` from when a server has been found."""

    progress: GroupProgress
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    server: ServerInfo | None = None
    stream: CompletionStream | None = None
    task: asyncio.Task[Samples] | None = None

    @property
    def sent(self) -> asyncio.Task[Samples]:
        assert self.task is not None
        return self.task

    def so_far(self) -> GroupProgress:
        """The progress with what has arrived."""
        assert self.stream is not None
        progress = self.progress.copy()
        progress.take(self.stream.samples(RequestFailed("it is silent", kind=MIGRATED)))
        return progress


@dataclass(slots=True)
class _Silence:
    """Of one server. `lost`: how many of the requests that were sent elsewhere too were answered there."""

    hedged: int = 0
    lost: int = 0


class HedgedRequests:
    """Used on one asyncio loop. `told` gets `hedge.began` and `hedge.ended`."""

    def __init__(self, client: SGLangClient, pool: ServerPool, config: RolloutConfig, told: Told) -> None:
        self._client = client
        self._pool = pool
        self._config = config
        self._event = told
        self._pace = StreamPace()
        self._live: dict[_Request, ServerKey] = {}
        self._silences: dict[ServerKey, _Silence] = {}
        self._watching: asyncio.Task[None] | None = None

    async def ask(self, progress: GroupProgress, *, prompt: str, weight_version: Version, avoid: str) -> HedgedAnswer:
        """The answer to what is missing; MIGRATED is the failure of a server that leaves."""
        leader, hedged, lost = self._begin(progress, prompt, weight_version, avoid), 0, 0
        try:
            while (silent := await self._falls_silent(leader)) is not None:
                so_far = leader.so_far()
                leader.heard.clear()
                other = self._begin(so_far, prompt, weight_version, silent.name, is_hedge=True)
                try:
                    is_lost = await _takes_over(other, leader)
                    if is_lost:
                        leader, other = other, leader
                    has_failed = not is_lost and other.sent.done()
                finally:
                    await _end(other)
                self._count(silent, is_lost=is_lost)
                hedged, lost = hedged + 1, lost + is_lost
                if has_failed:  # not at once again
                    await asyncio.wait({leader.sent}, timeout=self._config.retry_wait_initial)
            samples = await leader.sent
            assert leader.server is not None
            return HedgedAnswer(
                server=leader.server, samples=samples, progress=leader.progress, hedged=hedged, lost=lost
            )
        finally:
            await _end(leader)

    def _begin(
        self, progress: GroupProgress, prompt: str, weight_version: Version, avoid: str, *, is_hedge: bool = False
    ) -> _Request:
        request = _Request(progress)
        request.task = asyncio.create_task(self._send(request, prompt, weight_version, avoid, is_hedge=is_hedge))
        return request

    async def _send(
        self, request: _Request, prompt: str, weight_version: Version, avoid: str, *, is_hedge: bool
    ) -> Samples:
        inputs, samplings = request.progress.request()
        async with self._pool.acquire(weight_version, avoid=avoid, samples=len(samplings), prompt=prompt) as server:
            if is_hedge and server.name == avoid:
                return Samples(completions={}, failure=RequestFailed("there is no other server", kind=MIGRATED))
            request.server = server
            with self._watched(request, server) as heard:
                request.stream = stream = CompletionStream(len(samplings), server=server.url, heard=heard)
                asked = self._client.generate_samples(
                    server.url,
                    stream,
                    inputs=inputs,
                    samplings=samplings,
                    timeout_s=self._config.request_timeout,
                    stream_interval=self._config.stream_interval,
                )
                try:
                    return await self._pool.unless_migrated(server, asked)
                except RequestMigrated:
                    left = RequestFailed(f"{server.name} left before it had answered", kind=MIGRATED)
                    return stream.samples(broken_off=left)

    @contextmanager
    def _watched(self, request: _Request, server: ServerInfo) -> Iterator[Callable[[], None]]:
        """Gives what is to be called when tokens arrive."""
        if self._watching is not None and self._watching.done():
            self._watching.result()  # a defect: without the watch no silence would be noticed
        if self._watching is None:
            self._pace.tick()
            self._watching = asyncio.create_task(self._watch())
        live = self._pace.begins(server)
        self._live[request] = (server.name, server.generation)

        def heard() -> None:
            self._pace.heard(live)
            request.heard.set()
            request.silent.clear()

        try:
            yield heard
        finally:
            self._pace.ends(server, live)
            del self._live[request]
            if not self._live:
                self._watching.cancel()
                self._watching = None
                self._settle(set())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pace.tick()
            silent = silent_servers(self._pace.looks(), self._config)
            self._settle(silent.keys())
            for (name, generation), reason in silent.items():
                if not self._pool.has_other(name):
                    continue
                if (name, generation) not in self._silences:
                    self._silences[name, generation] = _Silence()
                    self._event("hedge.began", name, reason)
                    await self._pool.suspect(name, reason)
                for request, key in self._live.items():
                    if key == (name, generation):
                        request.silent.set()

    def _settle(self, silent: Set[ServerKey]) -> None:
        """Which are silent now. A silence is over when tokens come again, and when no request is left there."""
        for key in self._silences.keys() - silent:
            over = self._silences.pop(key)
            reason = f"{over.lost} of {over.hedged} requests that were sent to another server too were answered there"
            self._event("hedge.ended", key[0], reason)

    def _count(self, silent: ServerInfo, *, is_lost: bool) -> None:
        if (silence := self._silences.get((silent.name, silent.generation))) is not None:
            silence.hedged += 1
            silence.lost += is_lost

    async def _falls_silent(self, request: _Request) -> ServerInfo | None:
        """The server that does; None where the answer came first."""
        await _first_of(request.sent, request.silent)
        request.silent.clear()
        return None if request.sent.done() else request.server


async def _takes_over(other: _Request, leader: _Request) -> bool:
    """Whether `other` is heard first. Not where it fails; but where the leader fails, it continues."""
    await _first_of(leader.sent, leader.heard, other.sent, other.heard)
    if leader.heard.is_set():
        return False
    if leader.sent.done():
        return leader.sent.result().failure is not None and not other.sent.done()
    return other.heard.is_set()


async def _first_of(*them: asyncio.Task[Samples] | asyncio.Event) -> None:
    waiting = [one if isinstance(one, asyncio.Task) else asyncio.create_task(one.wait()) for one in them]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(waiting, them, strict=True):
            if isinstance(one, asyncio.Event):
                task.cancel()


async def _end(request: _Request) -> None:
    """Abort it, where it has not ended. Raises what only a defect could."""
    request.sent.cancel()
    (ended,) = await asyncio.gather(request.sent, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended
