"""Measures how fast each server generates: tokens for each second in which it had requests.

A server that is slowed down (a neighbour on its GPU, a throttled clock) answers every probe; only its throughput
shows it, compared with its own past and with its peers.
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
LATELY = 3
USUAL = 60
USUAL_AT_LEAST = 10


@dataclass(slots=True)
class _Server:
    """`since`: when the current busy period began; `windows`: tokens/s, oldest first."""

    requests: int = 0
    since: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    windows: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL + LATELY))

    def close_window_if_full(self) -> None:
        if self.busy_s >= WINDOW_S:
            self.windows.append(self.tokens / self.busy_s)
            self.busy_s, self.tokens = 0.0, 0


class ThroughputTracker:
    """`begins` and `ends` around each request, `made` for its tokens; `now` is any steady clock, in seconds."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def begins(self, name: str, now: float) -> None:
        server = self._servers.setdefault(name, _Server())
        if server.requests == 0:
            server.since = now
        server.requests += 1

    def made(self, name: str, tokens: int) -> None:
        if name in self._servers:
            self._servers[name].tokens += tokens

    def ends(self, name: str, now: float) -> None:
        """Busy time counts once, however many requests shared it."""
        server = self._servers.get(name)
        if server is None or server.requests == 0:
            return  # begun by an incarnation that has been forgotten
        server.busy_s += now - server.since
        server.since = now
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
        """Of each server whose usual pace is known: lately, against the windows before."""
        known = {name: list(server.windows) for name, server in self._servers.items()}
        return {
            name: Pace(lately=median(windows[-LATELY:]), usual=median(windows[:-LATELY]))
            for name, windows in known.items()
            if len(windows) >= USUAL_AT_LEAST + LATELY
        }
