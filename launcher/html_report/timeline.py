"""Where the time went: the run's states as one bar, and below it a lane for each subject that had an incident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from launcher.html_report.markup import Markup, join, tag
from launcher.html_report.plot import BOTTOM, NARROW, WIDE, Plot, Size, chart, clock_text, legend, time_ticks
from launcher.html_report.reward_chart import incident_entries
from launcher.reporting.incident_facts import IncidentFacts
from launcher.reporting.run_facts import RunFacts

LANE, FIRST_LANE, LABELS = 22, 6, 84
MOST_LANES = 8
OTHERS = "others"
STATES = {
    "INITIALIZING": "starting",
    "RUNNING": "running",
    "PAUSED": "paused",
    "REPAIRING": "repairing",
    "RESTORING": "restoring",
    "SHUTTING_DOWN": "ending",
}


def timeline(facts: RunFacts) -> Markup:
    if not facts.attempts:
        return tag("p", "Nothing has happened yet.", class_="none")
    subjects = _lanes(facts.incidents)
    height = FIRST_LANE + LANE * (1 + len(subjects)) + BOTTOM
    sizes = [replace(size, height=height, left=LABELS) for size in (WIDE, NARROW)]
    used = {state for _, state, _ in facts.states}
    entries = [(f"state {css}", css) for state, css in STATES.items() if state in used]
    entries += incident_entries(facts)
    label = "States of the run and its incidents over time"
    return join(chart(lambda size: _draw(facts, subjects, size), label=label, sizes=sizes), legend(*entries))


def _lanes(incidents: Sequence[IncidentFacts]) -> list[str]:
    """Those with most incidents have a lane of their own."""
    counts = Counter(one.subject for one in incidents)
    named = sorted(name for name, _ in counts.most_common(MOST_LANES))
    return [*named, OTHERS] if len(counts) > MOST_LANES else named


def _draw(facts: RunFacts, subjects: Sequence[str], size: Size) -> Markup:
    total_s = max(facts.clock.total_s, 1.0)
    plot = Plot(size=size, x=(0.0, total_s), y=(0.0, 1.0))
    rows = [_label("run", 0, size), *(_label(name, 1 + row, size) for row, name in enumerate(subjects))]
    return join(
        *rows,
        _states(facts, plot),
        *(_bar(facts, one, _row(one, subjects), plot) for one in facts.incidents),
        *(plot.vertical(at, "border", title="another attempt begins") for at in facts.clock.borders),
        plot.bottom("time of the run", time_ticks(total_s, size)),
    )


def _row(one: IncidentFacts, subjects: Sequence[str]) -> int:
    return 1 + (subjects.index(one.subject) if one.subject in subjects else len(subjects) - 1)


def _label(name: str, row: int, size: Size) -> Markup:
    shown = name if len(name) <= 13 else f"{name[:12]}…"
    return tag("text", shown, tag("title", name), x=size.left - 7, y=FIRST_LANE + LANE * row + 13, class_="tick end")


def _states(facts: RunFacts, plot: Plot) -> Markup:
    """Neighbours too short to be seen are drawn as one, in the colour of the first."""
    bars = []
    ends = [*(time for time, _, _ in facts.states[1:]), facts.attempts[-1].end]
    drawn_to = -1.0
    for (start, state, reason), end in zip(facts.states, ends, strict=False):  # without any state there is one end more
        css = STATES.get(state)
        first, last = facts.clock.at(start), facts.clock.at(end)
        left, right = plot.px(first), plot.px(last)
        if css is None or (right - left < 0.4 and left - drawn_to < 0.4):
            continue
        drawn_to = right
        title = f"{css} from {clock_text(first)} for {last - first:.1f} s" + (f": {reason}" if reason else "")
        bars.append(_rect(left, right, 0, f"state {css}", title))
    return join(*bars)


def _bar(facts: RunFacts, one: IncidentFacts, row: int, plot: Plot) -> Markup:
    end = one.ended_at if one.ended_at is not None else facts.attempts[-1].end
    first, last = facts.clock.at(one.began_at), facts.clock.at(end)
    css = "mended" if one.is_mended else "open"
    title = f"incident {one.number}: {one.what}; from {clock_text(first)} for {last - first:.1f} s"
    return _rect(plot.px(first), plot.px(last), row, css, title)


def _rect(left: float, right: float, row: int, css: str, title: str) -> Markup:
    return tag(
        "rect", tag("title", title), x=left, y=FIRST_LANE + LANE * row + 1, width=max(right - left, 2.0),
        height=LANE - 6, rx=2, class_=f"bar {css}",
    )  # fmt: skip
