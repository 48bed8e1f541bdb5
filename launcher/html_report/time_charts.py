"""Tokens per second over the steps; memory, and the run's states with its incidents, over the time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from launcher.html_report.reward_chart import incident_legend
from launcher.html_report.svg_chart import (
    BOTTOM,
    NARROW,
    WIDE,
    Chart,
    Plot,
    Size,
    chart,
    step_span,
    step_ticks,
    time_ticks,
    value_span,
)
from launcher.reporting.downsample import Point, downsample
from launcher.reporting.formats import clock_text, short
from launcher.reporting.run_facts import RunFacts
from launcher.run_log.incident_facts import IncidentFacts

GIB = 2**30
MOST_SERIES, MOST_LANES = 6, 8
OTHERS = "others"
LABELS = 84
STATES = {
    "INITIALIZING": "starting",
    "RUNNING": "running",
    "PAUSED": "paused",
    "REPAIRING": "repairing",
    "RESTORING": "restoring",
    "SHUTTING_DOWN": "ending",
}


def tokens_chart(facts: RunFacts) -> Chart | str:
    points = [(float(line.step), line.tokens_per_s) for line in facts.steps]
    if not any(math.isfinite(value) for _, value in points):
        return "No step has reported how many tokens it made."
    legend = (("line two", "tokens/s in rollouts, of the steps that were kept"), ("band two", "its range"))
    label = "Tokens generated per second in each step"
    return chart(lambda size: _draw_tokens(points, size), label=label, legend=legend)


def _draw_tokens(points: Sequence[Point], size: Size) -> Plot:
    bins, last = downsample(points, size.points), points[-1][0]
    plot = Plot(size, x=step_span([last]), y=(0.0, max(value_span(value for _, value in points)[1], 1.0)))
    plot.y_axis(short)
    plot.x_axis("global step", step_ticks(0, last, most=size.ticks_across))
    rates = (f"{one.mean:,.0f} tokens/s" if math.isfinite(one.mean) else "none" for one in bins)
    plot.hover((b.first - 0.5, b.last + 0.5, f"{b.steps_text}: {rate}") for b, rate in zip(bins, rates, strict=True))
    plot.band([(one.middle, one.low, one.high) for one in bins], "band two")
    plot.line([(one.middle, one.mean) for one in bins], "line two")
    return plot


def memory_chart(facts: RunFacts) -> Chart | str:
    """Shares of what there is, so that host and GPUs have one axis; GiB in the titles and the legend."""
    names = sorted({name for reading in facts.memory for name in reading.in_use})[:MOST_SERIES]
    if len(facts.memory) < 2:
        return "Memory was not sampled (memory.sample_interval_s), or not twice yet."
    legend = [(f"line s{index}", _peak_text(facts, name)) for index, name in enumerate(names)]
    legend += [("border", "another attempt begins")] if facts.clock.borders else []
    return chart(lambda size: _draw_memory(facts, names, size), label="Memory in use over time", legend=legend)


def _draw_memory(facts: RunFacts, names: Sequence[str], size: Size) -> Plot:
    plot = Plot(size, x=(0.0, max(facts.clock.total_s, 1.0)))
    plot.y_axis(lambda value: f"{100 * value:.0f} %")
    _draw_time(facts, plot, bottom=plot.floor)
    for index, name in enumerate(names):
        points = [(facts.clock.at(r.time), _share(r.in_use.get(name))) for r in facts.memory]
        plot.line([(one.middle, one.high) for one in downsample(points, size.points)], f"line s{index}")
    times = [facts.clock.at(reading.time) for reading in facts.memory]
    for start in range(0, len(times), per := max(-(-len(times) // size.points), 1)):
        end = times[min(start + per, len(times) - 1)]
        pairs = facts.memory[start].in_use.items()
        said = ", ".join(f"{name} {used / GIB:.1f} of {there / GIB:.1f} GiB" for name, (used, there) in pairs)
        plot.hover([(times[start], end, f"{clock_text(times[start])}: {said}")])
    return plot


def _share(pair: tuple[float, float] | None) -> float:
    return math.nan if pair is None or not pair[1] > 0 else pair[0] / pair[1]


def _peak_text(facts: RunFacts, name: str) -> str:
    pairs = [pair for reading in facts.memory if (pair := reading.in_use.get(name)) and math.isfinite(pair[0])]
    used, there = max(pairs, default=(math.nan, math.nan))
    return f"{name}, at most {used / GIB:.1f} of {there / GIB:.1f} GiB"


def _draw_time(facts: RunFacts, plot: Plot, *, bottom: float) -> None:
    """The axis, and where an attempt begins."""
    plot.x_axis("time of the run", time_ticks(plot.x[1], most=plot.size.ticks_across))
    for at in facts.clock.borders:
        plot.vertical(at, "border", title="another attempt begins", bottom=bottom)


def timeline_chart(facts: RunFacts) -> Chart | str:
    """The run's states as one lane, and below it a lane for each subject that had an incident."""
    if not facts.attempts:
        return "Nothing has happened yet."
    used = {state for _, state, _ in facts.states}
    legend = [(f"state {css}", css) for state, css in STATES.items() if state in used] + incident_legend(facts)
    lanes = ["run", *_subjects(facts.incidents)]
    sizes = [replace(size, height=BOTTOM + 12, left=LABELS) for size in (WIDE, NARROW)]
    label = "States of the run and its incidents over time"
    return chart(lambda size: _draw_timeline(facts, lanes, size), label=label, legend=legend, sizes=sizes)


def _subjects(incidents: Sequence[IncidentFacts]) -> list[str]:
    """Those with most incidents have a lane of their own."""
    counts = Counter(one.subject for one in incidents)
    named = sorted(name for name, _ in counts.most_common(MOST_LANES))
    return [*named, OTHERS] if len(counts) > MOST_LANES else named


def _draw_timeline(facts: RunFacts, lanes: Sequence[str], size: Size) -> Plot:
    plot = Plot(size, x=(0.0, max(facts.clock.total_s, 1.0)), lanes=lanes)
    _draw_states(facts, plot)
    for one in facts.incidents:
        first, last = facts.clock.at(one.began_at), facts.clock.at(one.ended_at or facts.attempts[-1].end)
        title = f"incident {one.number}: {one.what}; from {clock_text(first)} for {last - first:.1f} s"
        row = lanes.index(one.subject, 1) if one.subject in lanes[1:] else len(lanes) - 1
        plot.bar(first, last, f"bar {'mended' if one.is_over else 'open'}", title=title, row=row)
    _draw_time(facts, plot, bottom=plot.height)
    return plot


def _draw_states(facts: RunFacts, plot: Plot) -> None:
    """Neighbours too short to be seen are drawn as one, in the colour of the first."""
    ends = [*(time for time, _, _ in facts.states[1:]), facts.attempts[-1].end]
    drawn_to = -1.0
    for (start, state, reason), end in zip(facts.states, ends, strict=False):  # without any state there is one end more
        first, last, css = facts.clock.at(start), facts.clock.at(end), STATES.get(state)
        left, right = plot.px(first), plot.px(last)
        if css is None or (right - left < 0.4 and left - drawn_to < 0.4):
            continue
        drawn_to = right
        title = f"{css} from {clock_text(first)} for {last - first:.1f} s" + (f": {reason}" if reason else "")
        plot.bar(first, last, f"bar state {css}", title=title, row=0)
