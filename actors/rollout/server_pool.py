"""Which servers may answer rollouts now, and how busy each one is.

A request takes a *lease* on one of the servers that are READY at the weight version it asks for (P3: weights before
traffic), which one says launcher/policy/routing.py. Where there is none it waits: an outage costs time, never a
rollout. A server that refused or reset a connection is SUSPECT and gets no traffic until it has said its weight version
again. One that leaves is given nothing more; what it is still at is let end, or moves (`RequestMigrated`).

Lives on one asyncio loop; every method is called there. Consumes: `update` (whoever supervises the servers),
`confirm` and `suspect` (publisher, requests). Waits for: `lease`, `drain`. Unblocked by: any of the former, the end of
a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from actors.rollout.prefix_affinity import PrefixAffinity
from actors.rollout.throughput_tracker import ThroughputTracker
from launcher.base.errors import RolloutError, ServerError
from launcher.base.messages import ServerInfo, ServerState
from launcher.policy.routing import RoutingCandidate, route

Probe = Callable[[str], Awaitable[int | None]]
"""Asks the server at a url for its weight version; None where it does not answer."""

PROBE_INTERVAL_S = 0.5
LET_GO_S = 5.0
"""After the word that a life is over: a process that was ended breaks off what it was at by itself, and what has come
until then counts. A machine that is gone breaks off nothing; its requests would wait for rollout.request_timeout."""
OVER = frozenset({ServerState.DEAD, ServerState.STOPPED, ServerState.FAILED})

Answer = TypeVar("Answer")
Life = tuple[str, int]
"""A server's name and generation: what an earlier life had in flight is no load of the next."""


class RequestMigrated(Exception):
    """The server of a lease leaves, or is gone, before it has answered: to be asked again elsewhere. No attempt."""


@dataclass(slots=True)
class Load:
    """What one life of a server is answering. `moved` is set when it is to let go of it."""

    requests: int = 0
    samples: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class ServerPool:
    """`hold_timeout_s` is how long a lease waits for a server before the run is told that there is none.

    None: for ever, where somebody else sees to the servers and decides when to give up.
    """

    def __init__(self, probe: Probe, *, hold_timeout_s: float | None) -> None:
        self._probe = probe
        self._hold_timeout_s = hold_timeout_s
        self._servers: dict[str, ServerInfo] = {}
        self._loads: dict[Life, Load] = {}
        self._homes = PrefixAffinity()
        self._samples = 0
        self._most_samples: int | None = None
        self.leases_ended = 0
        self.paces = ThroughputTracker()
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
                    self._admitted[server.name] = server.generation if server.state is ServerState.READY else -1
                    self._let_go_of_what_is_over(server.name)
            self._changed.notify_all()

    def _let_go_of_what_is_over(self, name: str) -> None:
        for life, load in self._loads.items():
            if life[0] == name and self._is_over(life):
                asyncio.get_running_loop().call_later(LET_GO_S, load.moved.set)

    def _is_over(self, life: Life) -> bool:
        name, generation = life
        known = self._servers.get(name)
        if known is None or known.generation < generation:
            return False  # nobody has told of it yet
        return known.generation > generation or known.state in OVER

    async def while_it_lives(self, server: ServerInfo, asking: Awaitable[Answer]) -> Answer:
        """What this life of a server answers, which may have no lease. Raises ServerError where it is over first: a
        machine that is gone would keep whoever asks until the deadline."""
        answering = asyncio.ensure_future(asking)
        over = asyncio.ensure_future(self._wait_over((server.name, server.generation)))
        try:
            await asyncio.wait((answering, over), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ServerError(f"{server.name} (generation {server.generation}) ended before it answered")
            return answering.result()
        finally:
            for task in (answering, over):
                task.cancel()
            await asyncio.gather(answering, over, return_exceptions=True)

    async def _wait_over(self, life: Life) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over(life))

    async def update_if_alive(self, server: ServerInfo) -> None:
        """The word of somebody who has looked at it, and may have been overtaken. Raises ServerError where this life is
        over by now: it must get no traffic any more."""
        if self._is_over((server.name, server.generation)):
            raise ServerError(f"{server.name} (generation {server.generation}) ended meanwhile")
        await self.update([server])

    def servers(self) -> tuple[ServerInfo, ...]:
        return tuple(self._servers.values())

    def in_flight(self) -> dict[str, int]:
        """Requests that each server is answering, those of an earlier life included until they have ended."""
        requests = dict.fromkeys(self._servers, 0)
        for (name, _), load in self._loads.items():
            requests[name] = requests.get(name, 0) + load.requests
        return requests

    def is_living(self, server: ServerInfo) -> bool:
        """Is it this life of it that the pool knows, and not over?"""
        known = self._servers.get(server.name)
        return known is not None and known.generation == server.generation and known.state not in OVER

    async def confirm(self, name: str, weight_version: int, lineage: int | None = None) -> None:
        """The server has said that it holds these weights: it may answer for them, if it was admitted in this life."""
        known = self._servers.get(name)
        if known is None or known.state in OVER:  # it left, or ended, while its answer was on the way
            return
        admitted = self._admitted.get(name) == known.generation
        state = ServerState.READY if admitted else ServerState.STALE
        await self._put(name, state=state, weight_version=weight_version, lineage=lineage, reason="")

    async def mark_stale(self, name: str, reason: str) -> None:
        """The server's weights are not, or may not be, the ones it was sent: no traffic until confirmed."""
        known = self._servers.get(name)
        if known is not None and known.state not in OVER:
            await self._put(name, state=ServerState.STALE, reason=reason)

    async def suspect(self, name: str, reason: str) -> None:
        """A request found nobody there. No traffic until the server answers a probe."""
        server = self._servers.get(name)
        if server is None or server.state is not ServerState.READY:
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

    async def drain(self, name: str, *, within_s: float) -> int:
        """Give it no more; when what it is at has ended, or has moved after `within_s`, forget it. How many moved."""
        server = self._servers.get(name)
        if server is None:
            return 0
        await self._put(name, state=ServerState.STOPPED, reason="leaving")
        mine = [load for (owner, _), load in self._loads.items() if owner == name]
        moved = 0
        async with self._changed:
            try:
                async with asyncio.timeout(within_s):
                    await self._changed.wait_for(lambda: not any(load.requests for load in mine))
            except TimeoutError:
                moved = sum(load.requests for load in mine)
                for load in mine:
                    load.moved.set()
                with contextlib.suppress(TimeoutError):  # a request that does not let go ends by its own deadline
                    async with asyncio.timeout(LET_GO_S):
                        await self._changed.wait_for(lambda: not any(load.requests for load in mine))
            if self._servers[name].generation == server.generation:
                del self._servers[name], self._admitted[name]
                self.paces.forget(name)
        return moved

    @asynccontextmanager
    async def lease(
        self, weight_version: int, *, avoid: str = "", samples: int = 1, prompt: str = ""
    ) -> AsyncIterator[ServerInfo]:
        """A READY server at `weight_version`, another than `avoid` where there is one, for a request of so many
        samples of `prompt`.

        Raises RolloutError after `hold_timeout_s` without any.
        """
        server = await self._acquire(weight_version, avoid, samples, prompt)
        life = (server.name, server.generation)
        load = self._loads[life]
        self.paces.begins(server.name, time.monotonic())
        try:
            yield server
        finally:
            self.paces.ends(server.name, time.monotonic())
            load.requests -= 1
            load.samples -= samples
            self._samples -= samples
            self.leases_ended += 1
            if load.requests == 0:
                self._loads.pop(life, None)
            if self._most_samples is not None or server.name not in self._servers or self._is_leaving(server.name):
                async with self._changed:
                    self._changed.notify_all()

    def _is_leaving(self, name: str) -> bool:
        return self._servers[name].state is ServerState.STOPPED

    async def unless_moved(self, server: ServerInfo, request: Coroutine[Any, Any, Answer]) -> Answer:
        """What a request to a leased server answers. Raises Moved where the server leaves first."""
        load = self._loads[(server.name, server.generation)]
        asking, moved = asyncio.ensure_future(request), asyncio.ensure_future(load.moved.wait())
        try:
            await asyncio.wait((asking, moved), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise RequestMigrated(server.name)
            return asking.result()
        finally:
            for task in (asking, moved):
                task.cancel()
            await asyncio.gather(asking, moved, return_exceptions=True)

    async def _acquire(self, weight_version: int, avoid: str, samples: int, prompt: str) -> ServerInfo:
        try:
            async with asyncio.timeout(self._hold_timeout_s), self._changed:
                while (server := self._route(weight_version, avoid, samples, prompt)) is None or not self._has_room(
                    samples
                ):
                    await self._changed.wait()
                load = self._loads.setdefault((server.name, server.generation), Load())
                load.requests += 1
                load.samples += samples
                self._samples += samples
                self._homes.asked(prompt, server)
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

    def _route(self, weight_version: int, avoid: str, samples: int, prompt: str) -> ServerInfo | None:
        candidates = [
            RoutingCandidate(
                name=server.name,
                index=server.index,
                samples=self._samples_of(server),
                is_warm=self._homes.is_warm(prompt, server),
                is_home=self._homes.is_home(prompt, server),
                is_avoided=server.name == avoid,
            )
            for server in self._servers.values()
            if server.state is ServerState.READY and server.weight_version == weight_version
        ]
        taken = route(candidates, samples=samples)
        return None if taken is None else self._servers[taken.name]

    def _samples_of(self, server: ServerInfo) -> int:
        load = self._loads.get((server.name, server.generation))
        return 0 if load is None else load.samples

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
