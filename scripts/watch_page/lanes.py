"""The states of a run and of each of its servers over its time, as the page draws them: one lane each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.html_report.time_charts import STATES
from launcher.reporting.formats import clock_text
from launcher.reporting.run_facts import RunFacts
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_ends import ENDS
from launcher.run_log.run_clock import RunClock
from launcher.run_log.run_log import StateChange

MOST_SPANS = 800
"""Across a lane; neighbours shorter than this part of it are drawn as one."""
LOOKS = {"READY": "running", "STARTING": "starting", "LEAVING": "ending"}


def lanes_of(facts: RunFacts, servers: Mapping[str, Sequence[StateChange]]) -> list[dict[str, object]]:
    clock, end = facts.clock, max((one.end for one in facts.attempts), default=0.0)
    found = [_lane("run", facts.states, STATES, clock, end)]
    found += [_lane(name, changes, LOOKS, clock, end) for name, changes in sorted(servers.items())]
    return found


def _lane(
    name: str, changes: Sequence[StateChange], looks: Mapping[str, str], clock: RunClock, end: float
) -> dict[str, object]:
    """`spans`: from and to as shares of the whole, look, and text. A state without a look is trouble."""
    spans: list[tuple[float, float, str, str]] = []
    total = max(clock.total_s, 1e-9)
    for (start, state, reason), until in zip(changes, [*(time for time, _, _ in changes[1:]), end], strict=False):
        if not state or state in ENDS.values():
            continue
        first, last = clock.at(start), clock.at(until)
        if spans and last - first < total / MOST_SPANS and first / total - spans[-1][0] < 1 / MOST_SPANS:
            continue
        text = f"{name}: {state} from {clock_text(first)} for {last - first:.1f} s" + (f": {reason}" if reason else "")
        spans.append((first / total, last / total, looks.get(state, "bad"), visible(text)))
    return {"name": visible(name), "spans": spans}
