"""Which servers may answer rollouts now, and how busy each one is.

A request acquires one of the servers that are READY at the weight version it asks for (P3: weights before traffic);
launcher/policy/routing.py chooses. Where there is none it waits: an outage costs time, never a rollout. A server that
refused or reset a connection, or is silent, is SUSPECT and gets no traffic until it has generated again. A server that
leaves gets no new requests; those in flight finish or are moved (`RequestMoved`), as are those of one that is about to
load weights.

All methods run on one asyncio loop. `acquire`, `drain` and `clear` wait; `update`, `confirm`, `suspect` and the release
of a server wake them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from launcher.base.errors import RequestFailed, ServerError
from launcher.base.messages import ServerInfo, ServerKey, ServerState
from launcher.policy.routing import RoutingCandidate, route


class RequestMoved(Exception):
    """The server leaves, is gone or is silent before it has answered: ask another one. Does not count as an attempt."""


class ServerRequest(ABC):
    """What is asked of one server after another, until it is over."""

    prompt = ""
    """The prompt's id: the server that had it before may have its prefix."""
    avoid = ""
    """The server that has just failed at it, or fell silent."""
    continues = True
    """Its tokens are heard as they are made, and the next server continues from the last one. Else waiting for it shows
    no silence of its server, and a silence does not move it: it would begin anew."""
    silences = 0
    """How often it was moved for a silence."""
    is_unheard = False
    """It was moved for a silence, and no token has come since. It stays until one has: else two silent servers would
    hand it to each other, and begin anew each time."""

    @property
    def samples(self) -> int:
        """That are missing."""
        return 1

    @abstractmethod
    async def send(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        """Ask for what is missing, and keep what arrives, also where this is cancelled. `heard`: to be called whenever
        tokens arrive. Raises RequestFailed."""

    @abstractmethod
    def is_over(self) -> bool:
        """Asked after each server, whatever came of it."""

    async def failed(self, failure: RequestFailed) -> None:
        """Returns where it is to be asked again."""
        raise failure


class ServerTurn:
    """A request at a server, or waiting for one: until then `server` is None. It is moved by a deadline, in the task
    that asks: a task for each turn would cost as much as the rest of it."""

    def __init__(self, request: ServerRequest) -> None:
        self.request = request
        self.server: ServerInfo | None = None
        self.limit = asyncio.timeout(None)

    @property
    def key(self) -> ServerKey | None:
        """The incarnation of its server."""
        return None if self.server is None else self.server.key

    def move(self, within_s: float = 0.0) -> None:
        """End it then, unless it ends earlier."""
        at = asyncio.get_running_loop().time() + within_s
        if not self.limit.expired() and ((before := self.limit.when()) is None or at < before):
            self.limit.reschedule(at)

    def stay(self) -> None:
        """It is not moved any more, unless it has been."""
        if not self.limit.expired():
            self.limit.reschedule(None)


Probe = Callable[[str], Awaitable[int | None]]
"""Has the server at a url generate a token, and returns of which weight version; None where it does not answer."""

PROBE_INTERVAL_S = 0.5
LET_GO_S = 5.0
"""From the report of a server's end until its requests are moved: a process that ended breaks its connections, and
what has arrived counts. A machine that is gone breaks none: its requests would wait for rollout.request_timeout."""
OVER = frozenset({ServerState.DEAD, ServerState.STOPPED, ServerState.FAILED})
MOST_PROMPTS = 100_000
"""Whose server is remembered, about 20 MB; the least recently asked is forgotten first."""

Answer = TypeVar("Answer")
Version = int | Callable[[], int]


@dataclass(slots=True)
class Load:
    """What one incarnation of a server is answering."""

    requests: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class _Home:
    name: str
    generation: int
    weights: tuple[int | None, int | None]


class PrefixAffinity:
    """Which server was last asked for each prompt, and so may have its prefix in its cache. `prompt` is the prompt's
    id; "" is not remembered."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def asked(self, prompt: str, server: ServerInfo) -> None:
        if not prompt:
            return
        self._homes[prompt] = _Home(server.name, server.generation, (server.weight_version, server.lineage))
        self._homes.move_to_end(prompt)
        if len(self._homes) > MOST_PROMPTS:
            self._homes.popitem(last=False)

    def home(self, prompt: str) -> str:
        """The name of the server that was last asked for this prompt, "" where none was."""
        home = self._homes.get(prompt)
        return "" if home is None else home.name

    def is_warm(self, prompt: str, server: ServerInfo) -> bool:
        """Whether neither a restart nor a weight update has emptied its cache since."""
        home = self._homes.get(prompt)
        return home == _Home(server.name, server.generation, (server.weight_version, server.lineage))


class ServerPool:
    """Who waits for a server waits for ever: the supervisor repairs servers, and decides when to give up."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._servers: dict[str, ServerInfo] = {}
        self._loads: dict[ServerKey, Load] = {}
        self.turns: set[ServerTurn] = set()
        self._affinity = PrefixAffinity()
        self._samples = 0
        self._most_samples: int | None = None
        self._is_paused = False
        self.released = 0
        self.lineage: int | None = None  # a restore brings the same versions of other weights; None: of any
        self._admitted: dict[str, int] = {}  # the generation that the supervisor has let in
        self._changed = asyncio.Condition()
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def update(self, servers: Iterable[ServerInfo]) -> None:
        """Take the supervisor's view of servers; an older generation than the known one is ignored."""
        async with self._changed:
            for server in servers:
                self._take_server(server)
            self._changed.notify_all()

    def _take_server(self, server: ServerInfo) -> None:
        if (known := self._servers.get(server.name)) is not None and server.generation < known.generation:
            return
        self._servers[server.name] = server
        if server.state is ServerState.READY:
            self._admitted[server.name] = server.generation
        else:
            self._admitted.pop(server.name, None)
        for key in self._loads:
            if key[0] == server.name and self._is_over(key):
                self._move({key}, LET_GO_S)

    def _is_over(self, key: ServerKey) -> bool:
        name, generation = key
        known = self._servers.get(name)
        if known is None or known.generation < generation:
            return False  # not reported yet
        return known.generation > generation or known.state in OVER

    async def unless_ended(self, server: ServerInfo, asking: Awaitable[Answer]) -> Answer:
        """Await an answer of this incarnation of a server. Raises ServerError where it ends first: a machine that is
        gone would keep the caller waiting until the deadline."""
        answering = asyncio.ensure_future(asking)
        ending = asyncio.ensure_future(self._wait_over(server.key))
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ServerError(f"{server.name} (generation {server.generation}) ended before it answered")
            return answering.result()
        finally:
            for task in (answering, ending):
                task.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)

    async def _wait_over(self, key: ServerKey) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over(key))

    async def update_if_alive(self, server: ServerInfo) -> None:
        """`update` with what may be outdated. Raises ServerError where this incarnation has ended."""
        async with self._changed:
            if self._is_over(server.key):
                raise ServerError(f"{server.name} (generation {server.generation}) ended meanwhile")
            self._take_server(server)
            self._changed.notify_all()

    async def admit(self, server: ServerInfo, *, is_loading: bool) -> None:
        """Give this incarnation traffic; while it loads weights it gets it when it has confirmed them. What is known of
        it counts: it may have taken newer weights than `server` has. Raises ServerError where it has ended."""
        async with self._changed:
            if self._is_over(server.key):
                raise ServerError(f"{server.name} (generation {server.generation}) ended meanwhile")
            known = self._servers.get(server.name, server)
            newest = known if known.key == server.key else server
            if is_loading:
                self._admitted[server.name] = server.generation
            else:
                self._take_server(dataclasses.replace(newest, state=ServerState.READY, reason=""))
            self._changed.notify_all()

    def servers(self) -> tuple[ServerInfo, ...]:
        return tuple(self._servers.values())

    def in_flight(self) -> dict[str, int]:
        """Requests that each server is answering, including an earlier incarnation's until they have ended."""
        requests = dict.fromkeys(self._servers, 0)
        for name, probing in self._probing.items():  # which is a request too, perhaps the only one that was not moved
            if name in requests:
                requests[name] = int(not probing.done())
        for (name, _), load in self._loads.items():
            requests[name] = requests.get(name, 0) + load.requests
        return requests

    def is_living(self, server: ServerInfo) -> bool:
        """Whether this is the incarnation that the pool knows, and it has not ended."""
        known = self._servers.get(server.name)
        return known is not None and known.generation == server.generation and known.state not in OVER

    async def confirm(self, key: ServerKey, weight_version: int, lineage: int | None = None) -> None:
        """The server holds these weights: it gets traffic for them, if this incarnation was admitted."""
        await self._change(key, lambda known: self._with_weights(known, weight_version, lineage))

    def _with_weights(self, known: ServerInfo, weight_version: int, lineage: int | None) -> ServerInfo:
        state = ServerState.READY if self._admitted.get(known.name) == known.generation else ServerState.STALE
        lineage = known.lineage if lineage is None else lineage
        return dataclasses.replace(known, state=state, weight_version=weight_version, lineage=lineage, reason="")

    async def mark_stale(self, key: ServerKey, reason: str) -> None:
        """The server may not hold the weights it was sent: no traffic until confirmed."""
        await self._change(key, lambda known: dataclasses.replace(known, state=ServerState.STALE, reason=reason))

    async def clear(self, name: str, *, within_s: float) -> int:
        """Until a server that gets no new requests has none: they finish, or are moved after `within_s`. Returns how
        many were moved. `name` "": of all servers.
        """
        keys = {key for key in self._loads if name in ("", key[0])}
        mine = [self._loads[key] for key in keys]
        async with self._changed:
            if await self._ended(mine, within_s):
                return 0
            moved = sum(load.requests for load in mine)
            self._move(keys)
            await self._ended(mine, LET_GO_S)  # a request that does not let go ends by its own deadline
        return moved

    async def _ended(self, loads: Sequence[Load], within_s: float) -> bool:
        """Whether the requests have ended in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._changed.wait_for(lambda: not any(load.requests for load in loads))
        return False

    def _move(self, keys: Set[ServerKey], within_s: float = 0.0) -> None:
        for turn in self.turns:
            if turn.key in keys:
                turn.move(within_s)

    def pause(self) -> None:
        """No request gets a server until `resume`; those in flight continue."""
        self._is_paused = True

    async def resume(self) -> None:
        self._is_paused = False  # at once, as `pause`: one that comes while this waits to wake others would be undone
        async with self._changed:
            self._changed.notify_all()

    def has_other(self, name: str) -> bool:
        """Whether another server may answer what this one is asked."""
        known = self._servers.get(name)
        return known is not None and any(
            other.state is ServerState.READY
            and (other.weight_version, other.lineage) == (known.weight_version, known.lineage)
            for other in self._servers.values()
            if other.name != name
        )

    async def suspect(self, key: ServerKey, reason: str) -> None:
        """A connection failed, or it is silent. No traffic until the server answers a probe."""

        def suspect(known: ServerInfo) -> ServerInfo | None:
            one = dataclasses.replace(known, state=ServerState.SUSPECT, reason=reason)
            return one if known.state is ServerState.READY else None

        if (suspected := await self._change(key, suspect)) is not None:
            if (earlier := self._probing.get(suspected.name)) is not None:
                earlier.cancel()  # of a doubt that other news ended: `close` would know of the later one only
            self._probing[suspected.name] = asyncio.create_task(self._probe_until_back(suspected))

    async def close(self) -> None:
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    async def limit(self, most_samples: int) -> None:
        """From now on at most so many samples in flight; those already in flight continue."""
        async with self._changed:
            self._most_samples = most_samples
            self._changed.notify_all()

    async def drain(self, name: str, *, within_s: float) -> int:
        """No new requests for it; when those in flight have finished, or were moved after `within_s`, forget it.

        Returns how many were moved.
        """
        async with self._changed:
            if (server := self._servers.get(name)) is None:
                return 0
            self._servers[name] = dataclasses.replace(server, state=ServerState.STOPPED, reason="leaving")
            self._changed.notify_all()
        moved = await self.clear(name, within_s=within_s)
        if (known := self._servers.get(name)) is not None and known.generation == server.generation:  # not asked twice
            del self._servers[name]
            self._admitted.pop(name, None)
        return moved

    @asynccontextmanager
    async def acquire(
        self, weight_version: Version, *, avoid: str = "", samples: int = 1, prompt: str = ""
    ) -> AsyncIterator[ServerInfo]:
        """A READY server at `weight_version`, not `avoid` where there is another, for so many samples of `prompt`.
        A function: of whatever version it names when there is one."""
        server = await self._wait_for_server(weight_version, avoid, samples, prompt)
        key = server.key
        load = self._loads[key]
        try:
            yield server
        finally:
            load.requests -= 1
            load.samples -= samples
            self._samples -= samples
            self.released += 1
            if load.requests == 0:
                self._loads.pop(key, None)
            await self._wake()

    async def _wake(self) -> None:
        """A cancellation comes after it: who waits for the place that is free now would wait for ever."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                async with self._changed:  # held by others for moments only
                    self._changed.notify_all()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    @asynccontextmanager
    async def take_turn(self, turn: ServerTurn, weight_version: Version) -> AsyncIterator[ServerInfo]:
        """A server for a request, as of `acquire`. Raises RequestMoved where it is to leave, or to wait no more."""
        request = turn.request
        try:
            async with turn.limit:
                self.turns.add(turn)
                async with self.acquire(
                    weight_version, avoid=request.avoid, samples=request.samples, prompt=request.prompt
                ) as turn.server:
                    try:
                        yield turn.server
                    finally:  # else a move could keep it from waking those who wait for its place
                        self.turns.discard(turn)
                        turn.stay()
        except TimeoutError:
            if turn.limit.expired():
                raise RequestMoved from None
            raise
        finally:
            self.turns.discard(turn)

    async def until_served(self, weight_version: Version) -> None:
        """Until a server may answer at `weight_version`, also while requests are paused."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._route(weight_version, "", 1, "") is not None)

    async def _wait_for_server(self, weight_version: Version, avoid: str, samples: int, prompt: str) -> ServerInfo:
        async with self._changed:
            while (
                self._is_paused
                or not self._has_room(samples)
                or (server := self._route(weight_version, avoid, samples, prompt)) is None
            ):
                await self._changed.wait()
            load = self._loads.setdefault(server.key, Load())
            load.requests += 1
            load.samples += samples
            self._samples += samples
            self._affinity.asked(prompt, server)
            return server

    def _has_room(self, samples: int) -> bool:
        """A request larger than the limit goes alone."""
        return self._most_samples is None or self._samples == 0 or self._samples + samples <= self._most_samples

    def _route(self, weight_version: Version, avoid: str, samples: int, prompt: str) -> ServerInfo | None:
        """Of all servers only two can be chosen: the least loaded, and the one that has had the prompt."""
        wanted = weight_version if isinstance(weight_version, int) else weight_version()
        home = self._affinity.home(prompt)
        least, fewest, special = None, 0, []
        for server in self._servers.values():
            is_current = server.weight_version == wanted and self.lineage in (None, server.lineage)
            if server.state is not ServerState.READY or not is_current:
                continue
            if server.name == home or server.name == avoid:
                special.append(server)
                continue
            in_flight = self._samples_of(server)
            if least is None or (in_flight, server.index) < (fewest, least.index):
                least, fewest = server, in_flight
        candidates = [
            RoutingCandidate(
                name=server.name,
                index=server.index,
                samples=self._samples_of(server),
                is_warm=self._affinity.is_warm(prompt, server),
                is_home=server.name == home,
                is_avoided=server.name == avoid,
            )
            for server in (*special, *filter(None, [least]))
        ]
        taken = route(candidates, samples=samples)
        return None if taken is None else self._servers[taken.name]

    def _samples_of(self, server: ServerInfo) -> int:
        return self._loads.get(server.key, Load()).samples

    async def _change(self, key: ServerKey, change: Callable[[ServerInfo], ServerInfo | None]) -> ServerInfo | None:
        """What an incarnation is from now on; None where it stays what it is, has ended, or is not the one that is
        known: news of an earlier one must not hit its successor. `change` gets what is known when its turn comes."""
        name, generation = key
        async with self._changed:
            known = self._servers.get(name)
            if known is None or known.generation != generation or known.state in OVER:
                return None
            if (changed := change(known)) is not None:
                self._servers[name] = changed
                self._changed.notify_all()
            return changed

    async def _probe_until_back(self, suspected: ServerInfo) -> None:
        def back(version: int, known: ServerInfo) -> ServerInfo | None:
            return self._with_weights(known, version, None) if known == suspected else None

        while self._servers.get(suspected.name) == suspected:
            if (version := await self._probe(suspected.url)) is not None:
                await self._change(suspected.key, functools.partial(back, version))
                return
            await asyncio.sleep(PROBE_INTERVAL_S)
