"""Measures how fast each server generates: tokens for each second in which it had requests.

A server that is slowed down (a neighbour on its GPU, a throttled clock) answers every probe; only its throughput
shows it, compared with its own past and with its peers. Fewer requests at once make fewer tokens a second, so a
server is compared with what it made of no more of them.
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
ALIKE = 1.1
"""As many requests at once, but for so much."""


@dataclass(frozen=True, slots=True)
class _Window:
    """`at_once`: requests, in the mean."""

    tokens_per_s: float
    at_once: float


@dataclass(slots=True)
class _ServerThroughput:
    """`since`: up to when it is counted; `request_s`: seconds of each request; `windows`: oldest first."""

    requests: int = 0
    since: float = 0.0
    busy_s: float = 0.0
    request_s: float = 0.0
    tokens: int = 0
    windows: deque[_Window] = field(default_factory=lambda: deque(maxlen=USUAL + LATELY))

    def count_until(self, now: float) -> None:
        """Busy time counts once, however many requests share it."""
        if self.requests:
            self.busy_s += now - self.since
            self.request_s += self.requests * (now - self.since)
        self.since = now

    def close_window_if_full(self) -> None:
        if self.busy_s >= WINDOW_S:
            self.windows.append(_Window(self.tokens / self.busy_s, self.request_s / self.busy_s))
            self.busy_s, self.request_s, self.tokens = 0.0, 0.0, 0

    def pace(self) -> Pace | None:
        """Lately, against the windows before with no more requests at once; None where these are too few."""
        windows = list(self.windows)
        lately, before = windows[-LATELY:], windows[:-LATELY]
        at_once = ALIKE * median(window.at_once for window in lately) if lately else 0.0
        usual = [window.tokens_per_s for window in before if window.at_once <= at_once]
        if len(usual) < USUAL_AT_LEAST:
            return None
        return Pace(lately=median(window.tokens_per_s for window in lately), usual=median(usual))


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
        """Of each server whose usual pace is known."""
        return {name: pace for name, server in self._servers.items() if (pace := server.pace()) is not None}
