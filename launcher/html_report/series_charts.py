"""Tokens per second over the steps, and memory over the time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.html_report.markup import Markup, join, tag
from launcher.html_report.plot import Plot, Size, chart, clock_text, legend, span_of, step_ticks, time_ticks
from launcher.reporting.downsample import Stretch, downsample
from launcher.reporting.run_facts import RunFacts

GIB = 2**30
MOST_SERIES = 6


def tokens_chart(facts: RunFacts) -> Markup:
    points = [(float(line.step), line.tokens_per_s) for line in facts.steps]
    if not any(math.isfinite(value) for _, value in points):
        return tag("p", "No step has said how many tokens it made.", class_="none")
    label = "Tokens generated per second in each step"
    return join(
        chart(lambda size: _draw_tokens(points, size), label=label),
        legend(("line two", "tokens/s in rollouts, of the steps that stand"), ("band two", "its range")),
    )


def _draw_tokens(points: Sequence[tuple[float, float]], size: Size) -> Markup:
    stretches = downsample(points, size.points)
    last = points[-1][0]
    _, high = span_of([value for _, value in points])
    plot = Plot(size=size, x=(-0.01 * max(last, 1.0), 1.01 * max(last, 1.0)), y=(0.0, max(high, 1.0)))
    strips = [(s.first - 0.5, s.last + 0.5, _say_tokens(s)) for s in stretches]
    return join(
        plot.frame(x_label="global step", x_ticks=step_ticks(last, size), y_text=short),
        plot.hover(strips),
        tag("path", d=plot.area([(s.middle, s.low, s.high) for s in stretches]), class_="band two"),
        tag("path", d=plot.path([(s.middle, s.mean) for s in stretches]), class_="line two"),
    )


def _say_tokens(stretch: Stretch) -> str:
    rate = f"{stretch.mean:,.0f} tokens/s" if math.isfinite(stretch.mean) else "none"
    steps = f"step {stretch.first:.0f}" if stretch.count == 1 else f"steps {stretch.first:.0f} to {stretch.last:.0f}"
    return f"{steps}: {rate}"


def memory_chart(facts: RunFacts) -> Markup:
    """Shares of what there is, so that host and GPUs stand on one axis; GiB in the titles and the legend."""
    names = sorted({name for reading in facts.memory for name in reading.in_use})[:MOST_SERIES]
    if len(facts.memory) < 2:
        return tag("p", "Memory was not sampled (memory.sample_interval_s), or not twice yet.", class_="none")
    label = "Memory in use over time"
    entries = [(f"line s{index}", _peak_text(facts, name)) for index, name in enumerate(names)]
    entries += [("border", "another attempt begins")] if facts.clock.borders else []
    return join(chart(lambda size: _draw_memory(facts, names, size), label=label), legend(*entries))


def _draw_memory(facts: RunFacts, names: Sequence[str], size: Size) -> Markup:
    total_s = max(facts.clock.total_s, 1.0)
    plot = Plot(size=size, x=(0.0, total_s), y=(0.0, 1.0))
    parts = [
        plot.frame(
            x_label="time of the run", x_ticks=time_ticks(total_s, size), y_text=lambda value: f"{100 * value:.0f} %"
        )
    ]
    parts += [plot.vertical(at, "border", title="another attempt begins") for at in facts.clock.borders]
    for index, name in enumerate(names):
        points = [(facts.clock.at(r.time), _share(r.in_use.get(name))) for r in facts.memory]
        stretches = downsample(points, size.points)
        parts.append(tag("path", d=plot.path([(s.middle, s.high) for s in stretches]), class_=f"line s{index}"))
    readings = facts.memory
    marks = [facts.clock.at(reading.time) for reading in readings]
    size_of = max(-(-len(marks) // size.points), 1)
    strips = []
    for start in range(0, len(marks), size_of):
        end = marks[min(start + size_of, len(marks) - 1)]
        strips.append((marks[start], max(end, marks[start]), _say_memory(marks[start], readings[start].in_use)))
    return join(*parts, plot.hover(strips))


def _share(pair: tuple[float, float] | None) -> float:
    return math.nan if pair is None or not pair[1] > 0 else pair[0] / pair[1]


def _say_memory(at: float, in_use: object) -> str:
    assert isinstance(in_use, dict)
    parts = [f"{name} {used / GIB:.1f} of {there / GIB:.1f} GiB" for name, (used, there) in in_use.items()]
    return f"{clock_text(at)}: {', '.join(parts)}"


def _peak_text(facts: RunFacts, name: str) -> str:
    pairs = [pair for reading in facts.memory if (pair := reading.in_use.get(name)) and math.isfinite(pair[0])]
    used, there = max(pairs, default=(math.nan, math.nan))
    return f"{name}, at most {used / GIB:.1f} of {there / GIB:.1f} GiB"


def short(value: float) -> str:
    """`950`, `12k`, `1.5M`"""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
