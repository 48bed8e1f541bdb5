"""What a server's actor is asked, and what it answers: how its server is, as it sees it on the server's own machine.

    Coordinator ─ ServerWork ─► HealthMonitor ─ ServerWork ─► the server's actor
    Coordinator ◄ MonitorReport ─ HealthMonitor ◄ ServerReport ─ the server's actor

Both questions are held open until something changes. No time of another machine's clock travels, only ages: seconds
until the message was sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.base.messages import Health, ServerExit, ServerInfo, Verdict
from launcher.policy.exit_cause import ExitFinding, find_server_cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWork:
    """What the server is given to do, which the trainer knows and the server's actor does not."""

    generation: int  # the incarnation that was ordered last
    waiting: int = 0  # requests of clients in flight
    loading_s: float | None = None  # for how long it has been sent weights; None: it is not
    loading_limit_s: float = 0.0  # how long that may take

    def aged(self, seconds: float) -> ServerWork:
        return self if self.loading_s is None else replace(self, loading_s=self.loading_s + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """Of one server, for whoever ordered incarnation `ordered`."""

    ordered: int
    info: ServerInfo | None  # None: its actor has answered nobody yet
    verdict: Verdict | None = None  # None: not judged, as it was never READY or was told to stop
    end: ServerExit | None = None  # of the incarnation in `info`
    blind: str = ""  # why it could not be watched for a while
    silent_s: float = 0.0  # for how long its actor has been asked in vain

    def aged(self, seconds: float) -> ServerReport:
        return self if self.end is None else replace(self, end=self.end.aged(seconds))


def finding_of(end: ServerExit) -> ExitFinding:
    """Why that incarnation ended."""
    found = find_server_cause(end.reason.split(" | "), end.exit_code, oom_kills=end.oom_kills)
    return replace(found, reason=end.reason)


def verdict_on(end: ServerExit) -> Verdict:
    return Verdict(health=Health.DEAD, reason=end.reason, cause=finding_of(end).cause)
