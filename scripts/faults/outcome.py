"""What became of each fault: when it was detected, when the run had recovered, what it cost. On one host's clock.

Pure: the injector's record and the run's events and ledger in, one record for each fault that fired out. It is no fold
of the run's files: events belong to a fault by the moment of its signal, whatever attempt or restore they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.run_files.journal import Record
from scripts.faults.kinds import KINDS

NOTICED: Mapping[str, frozenset[str]] = {
    "server": frozenset({"server.died", "server.restarting", "health.dead", "health.suspect", "batch.rejected"}),
    "trainer": frozenset({"trainer.died", "trainer.restarting"}),
    "supervisor": frozenset({"coordinator.adopted", "monitor.started"}),
    "reward": frozenset({"batch.rejected", "trainer.pausing"}),
    "cluster": frozenset({"incident.began"}),
    "run": frozenset(),
}
"""By role, the events that show that a fault was detected; for a supervisor, which Ray restarts, its successor's first
event. Of a fault that hits no role of its own none is known."""
REWARD_FUNCTION = "verifier_broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """Seconds since the fault; None: never. `died_s`: until the journal recorded the death of its target.

    `taken_back`: committed steps that were trained again for it.
    """

    kind: str
    target: str
    step: int | None
    noticed_s: float | None
    noticed_by: str
    died_s: float | None
    serves_s: float | None
    next_step_s: float | None
    taken_back: int


def outcomes(
    record: Sequence[Record], events: Sequence[Record], commits: Sequence[tuple[float, int]]
) -> list[FaultOutcome]:
    """`commits`: of each committed step the monotonic time and its number, in the order in which they came."""
    fired = [line for line in record if line.get("what") == "fired"]
    ends = [*map(_began, fired[1:]), float("inf")]
    known = list(while_it_runs(events))
    found = []
    for number, (line, until) in enumerate(zip(fired, ends, strict=False)):
        alike = [later for later in fired[number + 1 :] if _role(later) == _role(line)]
        found.append(_outcome(line, until, min(map(_began, alike), default=float("inf")), known, commits))
    return found


def while_it_runs(events: Sequence[Record]) -> Iterator[Record]:
    """Without those of a run's own end, in which its servers are ended too."""
    ends = False
    for event in events:
        ends = event.get("event") == "run.halting" or (ends and event.get("event") != "run.started")
        if not ends:
            yield event


def _outcome(
    line: Record, until: float, alike_at: float, events: Sequence[Record], commits: Sequence[tuple[float, int]]
) -> FaultOutcome:
    """`until`: the next fault; `alike_at`: the next of the same role, which is noticed by the same events."""
    at, role = _began(line), _role(line)
    target = str(line.get("target", ""))
    after = [event for event in events if at <= _monotonic(event) < alike_at]
    noticed = next((e for e in after if e.get("event") in NOTICED[role] and _concerns(e, role, target)), None)
    died = next((e for e in after if str(e.get("event")).endswith(".died") and str(e.get("subject")) in target), None)
    ready = next((e for e in after if e.get("event") == "server.ready" and str(e.get("subject")) in target), None)
    later = [(when, step) for when, step in commits if when > at]
    before = max((step for when, step in commits if when <= at), default=-1)
    reached = [step for when, step in later if when < until]
    again = sum(1 for step in reached if step <= before)
    return FaultOutcome(
        kind=str(line.get("kind")),
        target=target,
        step=before if before >= 0 else None,
        noticed_s=None if noticed is None else _monotonic(noticed) - at,
        noticed_by="" if noticed is None else str(noticed.get("event")),
        died_s=None if died is None else _monotonic(died) - at,
        serves_s=_monotonic(ready) - at if role == "server" and ready is not None else None,
        next_step_s=later[0][0] - at if later else None,
        taken_back=again if role == "trainer" else 0,
    )


def _role(line: Record) -> str:
    return role_of(str(line.get("kind")))


def role_of(kind: str) -> str:
    """Whose events notice a fault of this kind, as its declaration says; of one that is declared no more: the run's."""
    declared = KINDS.get(kind)
    return "run" if declared is None else declared.noticed_as or declared.role


def _concerns(event: Record, role: str, target: str) -> bool:
    """A rejected batch names no server; it is the first sign of damaged weights. One that is rejected for the reward
    function is no sign of a server, nor the other way round."""
    if event.get("event") == "batch.rejected":
        cause = str(event.get("cause"))
        return cause != REWARD_FUNCTION if role == "server" else not cause.startswith("server_")
    return role not in ("server", "cluster") or str(event.get("subject")) in target


def _began(line: Record) -> float:
    """When the signal was sent; where none was, when it was begun."""
    for key in ("signalled_monotonic", "began_monotonic"):
        value = line.get(key)
        if isinstance(value, int | float):
            return float(value)
    return _monotonic(line)


def _monotonic(line: Record) -> float:
    value = line.get("monotonic")
    return float(value) if isinstance(value, int | float) else float("-inf")
