"""One thing that speaks for or against a cause, in a sentence with its figures and the line that it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.reading.log_patterns import without_head
from launcher.diagnosis.reading.log_records import Kind, LogEvent

SHARP_STEPS = 3
"""A fall within fewer steps is a drop."""
CONNECTION = (
    Kind.REFUSED,
    Kind.LOST,
    Kind.TIMEOUT,
    Kind.REQUEST_FAILED,
    Kind.ROLLOUT_FAILED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that speaks for (weight > 0) or against a cause. `where`: file and line, where there is one."""

    weight: int
    text: str
    where: str = ""


def incidents(context: IncidentContext, *causes: str) -> Iterator[Evidence]:
    """What the run itself found out while it went on."""
    own = [h for h in context.near(Kind.INCIDENT) if h.facts.get("cause") in causes]
    if own:
        yield seen_in(6, own, f"the run itself found {own[0].facts.get('cause')}: {own[0].facts.get('reason')}")


def seconds_of(event: LogEvent) -> float:
    seconds = event.facts.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def mean_count(log_events: Sequence[LogEvent]) -> float:
    return sum(h.count for h in log_events) / len(log_events) if log_events else 0.0


def times(log_events: Sequence[LogEvent]) -> str:
    count = sum(h.count for h in log_events)
    return "once" if count == 1 else f"{count:,} times"


def seen_in(weight: int, log_events: Sequence[LogEvent], text: str) -> Evidence:
    return Evidence(weight=weight, text=text, where=log_events[0].where)


def shown(event: LogEvent) -> str:
    line = without_head(str(event.facts.get("line") or event.text))
    return line if len(line) <= 160 else f"{line[:159]}…"
