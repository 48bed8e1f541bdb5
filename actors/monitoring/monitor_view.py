"""What the HealthMonitor is told of servers, and what it says of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.base.messages import Cause, Incident, ServerInfo, Verdict
from launcher.policy.canary_policy import CanaryVerdict
from launcher.policy.observation_history import Task
from launcher.policy.reward_health import RewardVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One server to watch: its life, its clients' requests in flight, and the long task that it was given."""

    server: ServerInfo
    waiting: int = 0
    task: Task | None = None

    def shifted(self, seconds: float) -> Watched:
        """As told by a machine whose clock is so far behind this one's."""
        if self.task is None or not seconds:
            return self
        return replace(self, task=replace(self.task, since=self.task.since + seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """Of one life of one server. `doubt`: why its weights are not trusted, "" where they are; `doubt_cause` with it."""

    name: str
    generation: int
    verdict: Verdict
    doubt: str = ""
    doubt_cause: Cause = Cause.SERVER_STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """All that the monitor says, as of now: `at`, on its own machine's clock.

    `rejected_in_a_row`: batches since the last that was admitted.
    """

    servers: tuple[ServerVerdict, ...]
    rewards: RewardVerdict
    canaries: CanaryVerdict
    incident: Incident | None = None
    rejected_in_a_row: int = 0
    last_rejection: str = ""
    at: float | None = None
