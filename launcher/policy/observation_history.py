"""Combines successive observations of a server: for how long it has been stopped, silent, or without work.

A duration counts only while somebody looked, and while the server was given the CPU it asked for. Else a monitor
that wakes from a pause of its own (garbage collection, a suspended machine) would find every answer overdue and
condemn healthy servers; and on a crowded machine it would condemn those that merely wait for their turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.config.supervision import HealthConfig

STOPPED = "T"
RUNNABLE = "R"
LONGEST_GAP = 2.0
"""Look intervals that one gap between two looks counts at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """One process of a tree: its state letter in /proc/PID/stat and the CPU seconds it has used.

    `switches`: of a stopped one, how often it has left the CPU. Two looks with one count have seen one stop.
    """

    state: str
    cpu_s: float
    switches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A long task that a server was given; until its deadline it need not produce a token."""

    name: str  # "starting" | "loading weights" | …
    since: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLook:
    """What was seen of one server at one moment. None: could not be seen.

    `processes` by role ("http", "scheduler", "detokenizer"). `answered_at`: the last good generation of one token;
    `probe_waits`: one has been asked for since, and has not come. `waiting`: requests of clients in flight. `tokens`:
    all that this incarnation has made, counted as they are made; a count of finished answers would make a long one look
    like a hang. `health_status`: of its health endpoint, shown to a person and never believed: it is 200 while dead and
    503 while busy. `probe_failure`: what came in place of the answer that is waited for, "" where nothing did.
    """

    at: float
    processes: Mapping[str, ProcessLook] | None
    probe_waits: bool = False
    answered_at: float | None = None
    usual_answer_s: float | None = None
    waiting: int = 0
    tokens: int | None = None
    task: Task | None = None
    health_status: int | None = None
    probe_failure: str = ""

    @property
    def has_stopped(self) -> bool:
        return any(process.state == STOPPED for process in (self.processes or {}).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvidence:
    """One incarnation of one server so far: the last look, and for how many seconds (as defined above) it has been …

    `stopped_s`: with a process stopped; `frozen_s`: with work, its scheduler asleep; `unanswered_s`: owing a probe;
    `dry_s`: owing clients a token; `barren_s`: owing a probe one, and making none for anybody. `token_at`: when its
    count last grew; `dead_at`: when it was last found dead, before which nothing proves that it lives.
    """

    look: ServerLook
    stopped_s: float = 0.0
    frozen_s: float = 0.0
    unanswered_s: float = 0.0
    dry_s: float = 0.0
    barren_s: float = 0.0
    token_at: float | None = None
    dead_at: float = float("-inf")
    stopped: frozenset[str] = field(default=frozenset())

    @property
    def proof_at(self) -> float | None:
        """When it last made a token, for whomever."""
        seen = (self.look.answered_at, self.token_at)
        return max((at for at in seen if at is not None and at > self.dead_at), default=None)


def observe(evidence: ServerEvidence, look: ServerLook, settings: HealthConfig) -> ServerEvidence:
    """The evidence with one more look. For a new incarnation begin with `ServerEvidence(look=…)`."""
    before = evidence.look
    looked_s = min(max(look.at - before.at, 0.0), LONGEST_GAP * settings.look_interval_s)
    served_s = 0.0 if _starved(before, look) else looked_s
    made = None if look.tokens is None or before.tokens is None else look.tokens - before.tokens
    at_task = look.task is not None or before.task is not None
    owes_client = look.waiting > 0 and not at_task
    owes_probe = look.probe_waits and look.answered_at == before.answered_at and not at_task
    stopped = _stopped(before, look)
    asleep = _used_no_cpu(before, look, "scheduler") and (owes_client or owes_probe) and not made
    return replace(
        evidence,
        look=look,
        stopped=stopped,
        stopped_s=evidence.stopped_s + looked_s if stopped else 0.0,
        frozen_s=evidence.frozen_s + served_s if asleep else 0.0,
        unanswered_s=evidence.unanswered_s + served_s if owes_probe else 0.0,
        dry_s=evidence.dry_s + served_s if owes_client and made == 0 else 0.0,
        barren_s=evidence.barren_s + served_s if owes_probe and made == 0 else 0.0,
        token_at=look.at if made else evidence.token_at,
    )


def _stopped(before: ServerLook, look: ServerLook) -> frozenset[str]:
    """The processes that one stop has lasted for from look to look: one that is stopped and continued many times a
    second (slow, not hung) may be met stopped at every look, and have had too little to do to show in its CPU time."""
    then = before.processes or {}
    return frozenset(
        role
        for role, process in (look.processes or {}).items()
        if process.state == STOPPED and process == then.get(role)
    )


def _starved(before: ServerLook, look: ServerLook) -> bool:
    """Some process wants to run, and was not let."""
    return any(
        process.state == RUNNABLE and _used_no_cpu(before, look, role)
        for role, process in (look.processes or {}).items()
    )


def _used_no_cpu(before: ServerLook, look: ServerLook, role: str) -> bool:
    then, now = (before.processes or {}).get(role), (look.processes or {}).get(role)
    return then is not None and now is not None and now.cpu_s <= then.cpu_s
