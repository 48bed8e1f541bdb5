"""One loop for each request: it takes a turn at a server, asks for what is missing, and begins again where it is moved.

    turn at a server ─► asks for what is missing ─► answered, or failed
         ▲                    │ moved: its server leaves, loads weights, has ended, or is silent
         └────────────────────┘ from the last token that had arrived

A silent server is SUSPECT in the pool: it gets no request until it has generated a token again. What it was asked is
aborted there, so that no completion is ever made of tokens of two servers but for those from before the move. Where a
silence was a false alarm, the move costs another prefill. How long tokens usually take shows what a silence is
(`StreamPace`). `GroupRequest` asks for a prompt's completions; one that failed has further attempts
(`request_attempts`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import stamina
from stamina import Attempt

from actors.rollout.server_pool import RequestMoved, ServerPool, ServerRequest, ServerTurn, Version
from actors.serving.completions import CompletionStream, Samples, joined
from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerKey
from launcher.base.rollouts import Completion
from launcher.config.schema import RolloutConfig
from launcher.policy.routing import StreamLook, silent_servers

NOBODY_THERE = frozenset({"refused", "reset", "truncated"})
"""Failures of the server, not of the request."""
OF_WEIGHTS = frozenset({"nonfinite", "impossible", "stale"})
"""Asked again, the same weights would give the same."""
MOVED = "moved"
"""The failure of what is missing of an answer where a request was moved: nothing says anything against the rest."""
Told = Callable[[str, str, str], object]
"""An event, the server, and the reason."""

TICK_S = 0.1
LONGEST_TICK_S = 2 * TICK_S
"""What one tick counts at most: while the trainer's own loop stood still (a long garbage collection, a machine without
CPU to spare) nothing was read, whatever the servers sent."""
KEPT = 20
"""Waits of each server, of which the usual one is found."""
KNOWN_AT = 3
"""Requests of which a usual wait is known."""


@dataclass(slots=True, eq=False)
class LiveStream:
    """One request that is being answered: when it was last heard of, and its waits so far."""

    at: float
    last_s: float = 0.0
    first_s: float | None = None
    longest_s: float | None = None


@dataclass(slots=True)
class _ServerPace:
    generation: int
    live: list[LiveStream] = field(default_factory=list)
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    longest_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class StreamPace:
    """How long requests wait for tokens: of each server since the last, and usually.

    `begins`, `heard` and `ends` of each request, and `tick` every TICK_S while there are any. Time is counted in ticks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = float("-inf")
        self._now = 0.0
        self._servers: dict[str, _ServerPace] = {}

    def tick(self) -> None:
        at = self._clock()
        self._now += min(at - self._ticked_at, LONGEST_TICK_S)
        self._ticked_at = at

    def begins(self, server: ServerInfo) -> LiveStream:
        known = self._servers.get(server.name)
        if known is None or known.generation != server.generation:  # a new incarnation has no past
            known = self._servers[server.name] = _ServerPace(server.generation)
        stream = LiveStream(at=self._now)
        known.live.append(stream)
        return stream

    def heard(self, stream: LiveStream) -> None:
        """Some of its tokens have arrived."""
        stream.last_s = waited_s = self._now - stream.at
        stream.at = self._now
        if stream.first_s is None:
            stream.first_s = waited_s
        else:
            stream.longest_s = max(waited_s, stream.longest_s or 0.0)

    def ends(self, server: ServerInfo, stream: LiveStream) -> None:
        known = self._servers[server.name]
        if known.generation != server.generation:
            return
        known.live.remove(stream)
        if stream.first_s is not None:
            known.first_s.append(stream.first_s)
        if stream.longest_s is not None:
            known.longest_s.append(stream.longest_s)

    def looks(self) -> dict[ServerKey, StreamLook]:
        """Of each server that has requests."""
        return {
            (name, server.generation): StreamLook(
                silent_s=self._now - max(stream.at for stream in server.live),
                lately_s=max(max(stream.last_s, self._now - stream.at) for stream in server.live),
                usual_s=_usual(server),
            )
            for name, server in self._servers.items()
            if server.live
        }


def _usual(server: _ServerPace) -> float | None:
    has_begun = any(stream.first_s is not None for stream in server.live)
    waits = list(server.longest_s if has_begun else server.first_s)
    if len(waits) < KNOWN_AT:  # of a new server, whose first requests are long, those that it is answering
        waits += [stream.longest_s for stream in server.live if stream.longest_s is not None]
    return median(waits) if len(waits) >= KNOWN_AT else None


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


def request_attempts(config: RolloutConfig) -> AsyncIterable[Attempt]:
    """The first attempt and `rollout.request_retries` more. Only a RequestFailed that is `retryable` is tried again.

    After the first connection that breaks there is no wait: its server is SUSPECT, and another can continue now. After
    further ones there is: where all servers have died at once, each would else use up an attempt within milliseconds.
    """
    has_moved = False

    def may_try_again(error: Exception) -> bool | float:
        nonlocal has_moved
        if not (isinstance(error, RequestFailed) and error.retryable):
            return False
        if error.kind not in NOBODY_THERE or has_moved:
            return True
        has_moved = True
        return 0.0

    return stamina.retry_context(
        on=may_try_again,
        attempts=config.request_retries + 1,
        timeout=None,
        wait_initial=config.retry_wait_initial,
        wait_max=config.retry_wait_max,
        wait_jitter=config.retry_wait_initial,
    )


class GroupProgress:
    """One completion for each of `samplings`, all at `weight_version`, or with `or_newer` at least, whichever servers
    make them.

    A completion that a server has begun is continued by the next from its last token that arrived.
    """

    def __init__(
        self, token_ids: Sequence[int], samplings: Sequence[Sampling], weight_version: int, *, or_newer: bool = False
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._samplings = samplings
        self._weight_version = weight_version
        self._or_newer = or_newer
        self._whole: dict[int, Completion] = {}
        self._begun: dict[int, Completion] = {}
        self.kept_tokens = 0
        """Tokens of completions that another request than the one that began them has continued."""

    def missing(self) -> list[int]:
        return [place for place in range(len(self._samplings)) if place not in self._whole]

    def request(self) -> tuple[list[tuple[int, ...]], list[Sampling]]:
        """The input and the sampling of each missing completion, in the order of `missing`."""
        inputs, samplings = [], []
        for place in self.missing():
            begun = self._begun[place].token_ids if place in self._begun else ()
            inputs.append(self._token_ids + begun)
            samplings.append(self._samplings[place].after(len(begun)))
        return inputs, samplings

    def take_samples(self, samples: Samples) -> None:
        """The answer to the last `request`. Tokens of other weights are dropped."""
        missing = self.missing()
        for place, part in (*samples.completions.items(), *samples.begun.items()):
            if part.weight_version != self._weight_version and not (
                self._or_newer and part.weight_version > self._weight_version
            ):
                continue
            index = missing[place]
            if (before := self._begun.pop(index, None)) is not None:
                self.kept_tokens += len(before.token_ids)
                whole = joined(before, part)
            else:
                whole = part
            (self._whole if place in samples.completions else self._begun)[index] = whole

    def completions(self) -> list[Completion]:
        """All, in the order of their samplings. Raises KeyError while one is missing."""
        return [self._whole[place] for place in range(len(self._samplings))]


class GroupRequest(ServerRequest):
    """What is missing of a prompt's completions."""

    def __init__(self, prompt: str, progress: GroupProgress, client: SGLangClient, config: RolloutConfig) -> None:
        self.prompt = prompt
        self.progress = progress
        self._client = client
        self._config = config

    @property
    def samples(self) -> int:
        return len(self.progress.missing())

    def is_over(self) -> bool:
        return not self.progress.missing()

    async def send(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        """What is asked after a failure goes to the same server if that brought some of the completions, as its cache
        holds the prefix; else to another."""
        inputs, samplings = self.progress.request()
        stream = CompletionStream(len(samplings), server=server.url, heard=heard)
        try:
            samples = await self._client.generate_samples(
                server.url,
                stream,
                inputs=inputs,
                samplings=samplings,
                timeout_s=self._config.request_timeout,
                stream_interval=self._config.stream_interval,
            )
        except asyncio.CancelledError:  # what a server had sent counts
            left = RequestFailed(f"{server.name} was left before it had answered", kind=MOVED)
            self.progress.take_samples(stream.samples(broken_off=left))
            raise
        self.progress.take_samples(samples)
        self.avoid = "" if samples.completions else server.name
        _judge(server, samples)


def _judge(server: ServerInfo, samples: Samples) -> None:
    """Raises RequestFailed where a sample is missing, or of other weights than the server should have."""
    made = (*samples.completions.values(), *samples.begun.values())
    others = {one.weight_version for one in made} - {server.weight_version}
    if others:
        reason = f"{server.name} answered with weight version {min(others)}, not {server.weight_version}"
        raise RequestFailed(reason, kind="stale")
    if samples.failure is not None:
        raise samples.failure
