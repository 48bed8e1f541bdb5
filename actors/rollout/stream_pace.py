"""How long requests wait for tokens: of each server since the last, and usually.

Time is counted in ticks, and a tick that comes late counts little: while the trainer's own loop stood still (a long
garbage collection, a machine without CPU to spare) nothing was read, whatever the servers sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from launcher.base.messages import ServerInfo, ServerKey
from launcher.policy.routing import StreamLook

TICK_S = 0.1
LONGEST_S = 2 * TICK_S
"""What one tick counts at most."""
KEPT = 20
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
    """`begins`, `heard` and `ends` of each request, and `tick` every TICK_S while there are any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = float("-inf")
        self._now = 0.0
        self._servers: dict[str, _ServerPace] = {}

    def tick(self) -> None:
        at = self._clock()
        self._now += min(at - self._ticked_at, LONGEST_S)
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
