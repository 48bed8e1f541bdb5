"""One loop for each request: it takes a turn at a server, asks for what is missing, and begins again where it is moved.

    turn at a server ─► asks for what is missing ─► answered, or failed
         ▲                    │ moved: its server leaves, loads weights, has ended, or is silent
         └────────────────────┘ from the last token that had arrived

A silent server is SUSPECT in the pool: it gets no request until it has generated a token again. What it was asked is
aborted there, so that no completion is ever made of tokens of two servers but for those from before the move. Where a
silence was a false alarm, the move costs another prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.rollout.server_pool import RequestMoved, ServerPool, ServerRequest, ServerTurn, Version
from actors.rollout.stream_pace import TICK_S, LiveStream, StreamPace
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerKey
from launcher.config.schema import RolloutConfig
from launcher.policy.routing import silent_servers

NOBODY_THERE = frozenset({"refused", "reset", "truncated"})
"""Failures of the server, not of the request."""
OF_WEIGHTS = frozenset({"nonfinite", "impossible", "stale"})
"""Asked again, the same weights would give the same."""
Told = Callable[[str, str, str], object]
"""An event, the server, and the reason."""


class RequestLoop:
    """Used on one asyncio loop. `told` gets `hedge.began`."""

    def __init__(self, pool: ServerPool, config: RolloutConfig, told: Told) -> None:
        self._pool = pool
        self._config = config
        self._event = told
        self._pace = StreamPace()
        self._live: dict[ServerTurn, LiveStream] = {}
        self._silent: set[ServerKey] = set()
        self._watching: asyncio.Task[None] | None = None

    async def ask(self, request: ServerRequest, weight_version: Version) -> None:
        """Until it is over. Raises what its `failed` raises."""
        while True:
            turn = ServerTurn(request)
            try:
                async with self._pool.take_turn(turn, weight_version) as server:
                    with self._watched(turn, server) as heard:
                        await request.send(server, heard)
            except RequestMoved:
                pass  # what had arrived counts
            except RequestFailed as failure:
                assert turn.server is not None
                request.is_unheard = False  # another silence is another server's
                await self._report(turn.server, failure)
                await request.failed(failure)
            if request.is_over():
                return

    async def _report(self, server: ServerInfo, failure: RequestFailed) -> None:
        """What a failure shows of its server."""
        if failure.kind in OF_WEIGHTS:
            await self._pool.mark_stale(server.key, str(failure))
        if failure.kind in NOBODY_THERE:
            await self._pool.suspect(server.key, failure.kind)

    @contextmanager
    def _watched(self, turn: ServerTurn, server: ServerInfo) -> Iterator[Callable[[], None]]:
        """Gives what is to be called when tokens arrive."""
        if not turn.request.continues:  # else a long answer under way would be its server's silence
            yield lambda: None
            return
        if self._watching is not None and self._watching.done():
            self._watching.result()  # a defect: without the watch no silence would be noticed
        if self._watching is None:
            self._pace.tick()
            self._watching = asyncio.create_task(self._watch())
        live = self._live[turn] = self._pace.begins(server)

        def heard() -> None:
            self._pace.heard(live)
            turn.request.is_unheard = False

        try:
            yield heard
        finally:
            self._pace.ends(server, live)
            del self._live[turn]
            if not self._live:
                self._watching.cancel()
                self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pace.tick()
            silent = silent_servers(self._pace.looks(), self._config)
            self._silent &= silent.keys()
            for key, reason in silent.items():
                if self._pool.has_other(key[0]):
                    await self._move_on(key, reason)

    async def _move_on(self, key: ServerKey, reason: str) -> None:
        """All requests of a server that may go to another one."""
        name, _ = key
        if key not in self._silent:
            self._silent.add(key)
            self._event("hedge.began", name, reason)
            await self._pool.suspect(key, reason)
        for turn in self._live:
            request = turn.request
            if turn.key == key and not request.is_unheard:
                request.avoid = name
                request.is_unheard = True
                request.silences += 1
                turn.move()
