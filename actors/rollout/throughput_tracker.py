"""Measures how fast each server generates: tokens for each second in which it had requests.

A server that is slowed down (a neighbour on its GPU, a throttled clock) answers every probe; only its throughput
shows it, compared with that of the other servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from launcher.config.supervision import HealthConfig
from launcher.policy.liveness import Pace, slow_reason

WINDOW_S = 1.0
"""Busy seconds that one figure is taken over: a single answer shows little."""
LATELY = 5
"""Figures whose median counts: fewer, and the first seconds of a server that still compiles would call it slow."""


@dataclass(slots=True)
class _ServerThroughput:
    requests: int = 0
    since: float = 0.0  # up to when busy time is counted
    busy_s: float = 0.0
    request_s: float = 0.0  # of each request, added up
    tokens: int = 0
    windows: deque[Pace] = field(default_factory=lambda: deque(maxlen=LATELY))

    def count_until(self, now: float) -> None:
        """Busy time counts once, however many requests share it."""
        if self.requests:
            self.busy_s += now - self.since
            self.request_s += self.requests * (now - self.since)
        self.since = now

    def close_window_if_full(self) -> None:
        if self.busy_s >= WINDOW_S:
            self.windows.append(Pace(of_all=self.tokens / self.busy_s, of_each=self.tokens / self.request_s))
            self.busy_s, self.request_s, self.tokens = 0.0, 0.0, 0

    def pace(self) -> Pace:
        return Pace(
            of_all=median(window.of_all for window in self.windows),
            of_each=median(window.of_each for window in self.windows),
        )


class ThroughputTracker:
    """`begins` and `ends` around each request, `made` for its tokens; `now` is any steady clock, in seconds."""

    def __init__(self) -> None:
        self._servers: dict[str, _ServerThroughput] = {}

    def begins(self, name: str, now: float) -> None:
        server = self._servers.setdefault(name, _ServerThroughput())
        server.count_until(now)
        server.requests += 1

    def made(self, name: str, tokens: int) -> None:
        if name in self._servers:
            self._servers[name].tokens += tokens

    def ends(self, name: str, now: float) -> None:
        server = self._servers.get(name)
        if server is None or server.requests == 0:
            return  # begun by an incarnation that has been forgotten
        server.count_until(now)
        server.requests -= 1
        server.close_window_if_full()

    def forget(self, name: str) -> None:
        """A new incarnation begins without a past."""
        self._servers.pop(name, None)

    def slow(self, settings: HealthConfig) -> Mapping[str, str]:
        """The slow servers, with the reason."""
        paces = self.paces()
        reasons = {
            name: slow_reason(pace, [other for peer, other in paces.items() if peer != name], settings)
            for name, pace in paces.items()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def paces(self) -> Mapping[str, Pace]:
        """Of each server that has been measured long enough."""
        return {name: server.pace() for name, server in self._servers.items() if len(server.windows) == LATELY}
