"""A small world: one server as time goes by, its clients, its prober and whoever looks at it.

Time is simulated in ticks. The server makes tokens only while none of the processes that a token needs is stopped,
stuck or without CPU; looks, probes and counts are what a monitor would really get. Faults and traps are intervals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.serving.server_watch import SOONER
from launcher.base.messages import Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.liveness import judge_server
from launcher.policy.observation_history import ProcessLook, ServerEvidence, ServerLook, Task, observe

TICK_S = 0.05
CPU_TICK_S = 0.01
"""As /proc counts CPU time."""
ROLES = ("http", "scheduler", "detokenizer")
NEVER = float("inf")


@dataclass(frozen=True)
class Interval:
    """From `start` to `end` seconds; with a `period`, only in the first `share` of each period."""

    start: float
    end: float = NEVER
    period: float = 0.0
    share: float = 1.0

    def holds(self, t: float) -> bool:
        inside = self.start <= t < self.end
        return inside and (self.period == 0 or (t - self.start) % self.period < self.share * self.period)


NOT_AT_ALL = Interval(NEVER)
ALWAYS = Interval(0.0)


@dataclass
class WatchedServer:
    """`stopped`: by role. `asleep`: the scheduler sleeps for ever on a lock. `spinning`: it burns CPU for nothing.
    `starved`: runnable, but others have the CPU. `loading`: told to load weights. `unwatched`: the monitor itself
    pauses. `waiting`: requests of clients are in flight. `answer_s`: work until a probe is answered."""

    settings: HealthConfig = field(default_factory=HealthConfig)
    stopped: dict[str, Interval] = field(default_factory=dict)
    asleep: Interval = NOT_AT_ALL
    spinning: Interval = NOT_AT_ALL
    starved: Interval = NOT_AT_ALL
    paused: Interval = NOT_AT_ALL
    loading: Interval = NOT_AT_ALL
    unwatched: Interval = NOT_AT_ALL
    waiting: Interval = ALWAYS
    tokens_per_s: float = 40.0
    tokens_seen: bool = True
    answer_s: float = 0.1
    usual_answer_s: float | None = None
    health_status: int = 200

    def watch(self, until: float) -> list[tuple[float, Verdict]]:
        """The verdict at each look."""
        verdicts, evidence = [], None
        tokens, work_done, sent, answered_at, answer_due = 0.0, 0.0, False, None, 0.0
        cpu, switches = dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0)
        next_look = next_probe = 0.0
        for tick in range(int(until / TICK_S)):
            t = tick * TICK_S
            works = self._works(t)
            for role in ROLES:
                cpu[role] += TICK_S * self._uses_cpu(role, t)
                switches[role] += self._state(role, t) == "T" and self._state(role, t - TICK_S) != "T"
            if works and self.waiting.holds(t) and not self.loading.holds(t):
                tokens += self.tokens_per_s * TICK_S
            if sent and works and not self.loading.holds(t):
                work_done += TICK_S
                if work_done >= answer_due:
                    sent, answered_at, tokens = False, t, tokens + 1
            if not sent and t >= next_probe and not self.unwatched.holds(t):
                sent, work_done, answer_due, next_probe = True, 0.0, self.answer_s, t + self.settings.probe_interval_s
            if t >= next_look and not self.unwatched.holds(t):
                look = self._look(t, cpu, switches, tokens, sent, answered_at)
                evidence = observe(evidence, look, self.settings) if evidence else ServerEvidence(look=look)
                verdicts.append((t, judge_server(evidence, self.settings, t)))
                next_look = t + self.settings.look_interval_s * (SOONER if look.has_stopped else 1)
        return verdicts

    def _works(self, t: float) -> bool:
        halted = any(interval.holds(t) for interval in self.stopped.values())
        stuck = any(i.holds(t) for i in (self.asleep, self.spinning, self.starved, self.paused))
        return not halted and not stuck

    def _uses_cpu(self, role: str, t: float) -> float:
        if self.stopped.get(role, NOT_AT_ALL).holds(t) or self.starved.holds(t):
            return 0.0
        if role == "scheduler" and self.asleep.holds(t):
            return 0.0
        return 0.9 if self.spinning.holds(t) or self.waiting.holds(t) else 0.05

    def _state(self, role: str, t: float) -> str:
        if self.stopped.get(role, NOT_AT_ALL).holds(t):
            return "T"
        return "R" if self.starved.holds(t) or self.spinning.holds(t) else "S"

    def _seen(self, role: str, t: float, cpu_s: float, switches: int) -> ProcessLook:
        state = self._state(role, t)
        ticks_s = int(cpu_s / CPU_TICK_S) * CPU_TICK_S
        return ProcessLook(state=state, cpu_s=ticks_s, switches=switches if state == "T" else None)

    def _look(
        self,
        t: float,
        cpu: dict[str, float],
        switches: dict[str, int],
        tokens: float,
        sent: bool,
        answered_at: float | None,
    ) -> ServerLook:
        loading = self.loading.holds(t)
        return ServerLook(
            at=t,
            processes={role: self._seen(role, t, cpu[role], switches[role]) for role in ROLES},
            probe_waits=sent,
            answered_at=answered_at,
            usual_answer_s=self.usual_answer_s,
            waiting=8 if self.waiting.holds(t) else 0,
            tokens=int(tokens) if self.tokens_seen else None,
            task=Task(name="loading weights", since=self.loading.start, deadline_s=120.0) if loading else None,
            health_status=self.health_status,
        )
