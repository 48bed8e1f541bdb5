"""What the Coordinator sends to the HealthMonitor, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.base.messages import Cause, Incident, ServerInfo, Verdict
from launcher.policy.observation_history import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One server to watch: its incarnation, its clients' requests in flight, and the long task that it was given."""

    server: ServerInfo
    waiting: int = 0
    task: Task | None = None

    def shifted(self, seconds: float) -> Watched:
        """As sent by a machine whose clock is so many seconds behind this one's."""
        if self.task is None or not seconds:
            return self
        return replace(self, task=replace(self.task, since=self.task.since + seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """Of one incarnation of one server. `doubt`: why its weights are not trusted, "" where they are, with its cause."""

    name: str
    generation: int
    verdict: Verdict
    doubt: str = ""
    doubt_cause: Cause = Cause.SERVER_STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """All that the monitor reports, as of now: `at`, on its own machine's clock."""

    servers: tuple[ServerVerdict, ...]
    incident: Incident | None = None
    at: float | None = None
