"""The states of a run, of each of its servers, and its incidents over its time, as the page draws them: a lane each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.reporting.event_lines import incident_title
from launcher.reporting.formats import clock_text
from launcher.reporting.run_facts import RunFacts
from launcher.run_files.run_ends import ENDS
from launcher.run_log.run_clock import RunClock
from launcher.run_log.run_log import StateChange

MOST_SPANS = 800
"""Across a lane; neighbours shorter than this part of it are drawn as one."""
STATES = {
    "INITIALIZING": "starting",
    "RUNNING": "running",
    "PAUSED": "paused",
    "REPAIRING": "repairing",
    "RESTORING": "restoring",
    "SHUTTING_DOWN": "ending",
}
LOOKS = {"READY": "running", "STARTING": "starting", "LEAVING": "ending"}
Span = tuple[float, float, str, str]
"""From and to as shares of the whole, look, and text."""


def lanes_of(facts: RunFacts) -> list[dict[str, object]]:
    clock, end = facts.clock, max((one.end for one in facts.attempts), default=0.0)
    found: list[dict[str, object]] = [{"name": "run", "spans": _states("run", facts.states, STATES, clock, end)}]
    for name, changes in sorted(facts.servers.items()):
        found.append({"name": name, "spans": _states(name, changes, LOOKS, clock, end)})
    if facts.incidents:
        found.append({"name": "incidents", "spans": _incidents(facts, end)})
    return found


def _states(
    name: str, changes: Sequence[StateChange], looks: Mapping[str, str], clock: RunClock, end: float
) -> list[Span]:
    """A state without a look is trouble."""
    spans: list[Span] = []
    total = max(clock.total_s, 1e-9)
    for (start, state, reason), until in zip(changes, [*(time for time, _, _ in changes[1:]), end], strict=False):
        if not state or state in ENDS.values():
            continue
        first, last = clock.at(start), clock.at(until)
        if spans and last - first < total / MOST_SPANS and first / total - spans[-1][0] < 1 / MOST_SPANS:
            continue
        text = f"{name}: {state} from {clock_text(first)} for {last - first:.1f} s" + (f": {reason}" if reason else "")
        spans.append((first / total, last / total, looks.get(state, "bad"), text))
    return spans


def _incidents(facts: RunFacts, end: float) -> list[Span]:
    clock, total = facts.clock, max(facts.clock.total_s, 1e-9)
    spans: list[Span] = []
    for one in facts.incidents:
        first, last = clock.at(one.began_at), clock.at(one.ended_at or end)
        text = f"incident {one.number}, {incident_title(one.cause, one.subject)}: from {clock_text(first)}"
        look = "repairing" if one.is_over else "bad"
        spans.append((first / total, last / total, look, f"{text} for {last - first:.1f} s; {one.outcome}"))
    return spans
