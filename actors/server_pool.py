"""Which servers may answer rollouts now, and how busy each one is.

A request takes a *lease* on the least busy server that is READY at the weight version it asks for (P3: weights
before traffic). Where there is none it waits: an outage costs time, never a rollout. A server that refused or
reset a connection is SUSPECT and gets no traffic until it has said its weight version again.

Lives on one asyncio loop; every method is called there. Consumes: `update` (whoever supervises the servers),
`confirm` and `suspect` (publisher, requests). Waits for: `lease`. Unblocked by: any of the former.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from actors.pace_book import PaceBook
from launcher.errors import RolloutError
from launcher.messages import ServerInfo, ServerState

Probe = Callable[[str], Awaitable[int | None]]
"""Asks the server at a url for its weight version; None where it does not answer."""

PROBE_INTERVAL_S = 0.5


class ServerPool:
    """`hold_timeout_s` is how long a lease waits for a server before the run is told that there is none.

    None: for ever, where somebody else sees to the servers and decides when to give up.
    """

    def __init__(self, probe: Probe, *, hold_timeout_s: float | None) -> None:
        self._probe = probe
        self._hold_timeout_s = hold_timeout_s
        self._servers: dict[str, ServerInfo] = {}
        self._in_flight: dict[str, int] = {}
        self._samples = 0
        self._most_samples: int | None = None
        self.leases_ended = 0
        self.paces = PaceBook()
        self._admitted: dict[str, int] = {}  # the generation that the supervisor has called READY
        self._changed = asyncio.Condition()
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def update(self, servers: Iterable[ServerInfo]) -> None:
        """Take the supervisor's word; an older generation than the one known is ignored."""
        async with self._changed:
            for server in servers:
                known = self._servers.get(server.name)
                if known is None or server.generation >= known.generation:
                    if known is not None and server.generation > known.generation:
                        self.paces.forget(server.name)
                    self._servers[server.name] = server
                    self._in_flight.setdefault(server.name, 0)
                    self._admitted[server.name] = server.generation if server.state is ServerState.READY else -1
            self._changed.notify_all()

    def servers(self) -> tuple[ServerInfo, ...]:
        return tuple(self._servers.values())

    def in_flight(self) -> dict[str, int]:
        """Requests that each server is answering."""
        return dict(self._in_flight)

    async def confirm(self, name: str, weight_version: int, lineage: int | None = None) -> None:
        """The server has said that it holds these weights: it may answer for them, if it was admitted in this life."""
        admitted = self._admitted.get(name) == self._servers[name].generation
        state = ServerState.READY if admitted else ServerState.STALE
        await self._put(name, state=state, weight_version=weight_version, lineage=lineage, reason="")

    async def mark_stale(self, name: str, reason: str) -> None:
        """The server's weights are not, or may not be, the ones it was sent: no traffic until confirmed."""
        await self._put(name, state=ServerState.STALE, reason=reason)

    async def suspect(self, name: str, reason: str) -> None:
        """A request found nobody there. No traffic until the server answers a probe."""
        server = self._servers[name]
        if server.state is not ServerState.READY:
            return
        await self._put(name, state=ServerState.SUSPECT, reason=reason)
        self._probing[name] = asyncio.create_task(self._probe_until_back(self._servers[name]))

    async def close(self) -> None:
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    async def limit(self, most_samples: int) -> None:
        """From now on at most so many samples are asked for at once; what is in flight goes on."""
        async with self._changed:
            self._most_samples = most_samples
            self._changed.notify_all()

    @asynccontextmanager
    async def lease(self, weight_version: int, *, avoid: str = "", samples: int = 1) -> AsyncIterator[ServerInfo]:
        """The least busy READY server at `weight_version`, another than `avoid` where there is one, for a request of
        so many samples.

        Raises RolloutError after `hold_timeout_s` without any.
        """
        server = await self._acquire(weight_version, avoid, samples)
        self.paces.begins(server.name, time.monotonic())
        try:
            yield server
        finally:
            self.paces.ends(server.name, time.monotonic())
            self._in_flight[server.name] -= 1
            self._samples -= samples
            self.leases_ended += 1
            if self._most_samples is not None:
                async with self._changed:
                    self._changed.notify_all()

    async def _acquire(self, weight_version: int, avoid: str, samples: int) -> ServerInfo:
        try:
            async with asyncio.timeout(self._hold_timeout_s), self._changed:
                while (server := self._least_busy(weight_version, avoid)) is None or not self._has_room(samples):
                    await self._changed.wait()
                self._in_flight[server.name] += 1
                self._samples += samples
                return server
        except TimeoutError as error:
            raise RolloutError(
                f"no server answered at weight version {weight_version} within {self._hold_timeout_s} s: "
                + (", ".join(f"{s.name} {s.state} v{s.weight_version} {s.reason}" for s in self.servers()) or "none"),
                "look at llm_server-<i>.log; rollout.setup_timeout is how long rollouts wait for a server",
            ) from error

    def _has_room(self, samples: int) -> bool:
        """A request larger than the limit goes alone."""
        return self._most_samples is None or self._samples == 0 or self._samples + samples <= self._most_samples

    def _least_busy(self, weight_version: int, avoid: str) -> ServerInfo | None:
        ready = [
            server
            for server in self._servers.values()
            if server.state is ServerState.READY and server.weight_version == weight_version
        ]
        return min(ready, key=lambda s: (s.name == avoid, self._in_flight[s.name], s.index), default=None)

    async def _put(
        self,
        name: str,
        *,
        state: ServerState,
        reason: str,
        weight_version: int | None = None,
        lineage: int | None = None,
    ) -> None:
        async with self._changed:
            known = self._servers[name]
            self._servers[name] = dataclasses.replace(
                known,
                state=state,
                reason=reason,
                weight_version=known.weight_version if weight_version is None else weight_version,
                lineage=known.lineage if lineage is None else lineage,
            )
            self._changed.notify_all()

    async def _probe_until_back(self, suspected: ServerInfo) -> None:
        while self._servers.get(suspected.name) == suspected:
            version = await self._probe(suspected.url)
            if version is not None and self._servers.get(suspected.name) == suspected:
                await self.confirm(suspected.name, version)
                return
            await asyncio.sleep(PROBE_INTERVAL_S)
