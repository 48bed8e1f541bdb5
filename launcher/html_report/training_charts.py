"""Curves of all that a step reports: KL, entropy, gradient norm, lengths, seconds and the like, small and in a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.html_report.svg_chart import Chart, Plot, Size, Span, chart, step_span, step_ticks
from launcher.reporting.figures import charts_of
from launcher.reporting.run_facts import RunFacts

SMALL = Size(name="small", width=380, height=200, points=80, ticks_across=4)
"""Wide enough for a phone, and three beside each other elsewhere."""
LARGE_ONES = frozenset({"Reward", "Tokens per second"})
MOST, MOST_LINES = 40, 6


def training_charts(facts: RunFacts) -> tuple[list[Chart], list[Chart]]:
    """Those with a place of their own, and those of further figures; of the steps that were kept."""
    kept = facts.kept_lines()
    width = max(-(-int(kept.sum()) // SMALL.points), 1)
    curves: Mapping[str, Any] = facts.figures.curves(kept, width=width)
    wanted = [one for one in charts_of(facts.figures.keys) if one["title"] not in LARGE_ONES][:MOST]
    made = [(_chart(one, curves), one["is_further"]) for one in wanted if curves["x"]]
    return [one for one, is_further in made if not is_further], [one for one, is_further in made if is_further]


def _chart(wanted: Mapping[str, Any], curves: Mapping[str, Any]) -> Chart:
    keys, unit = wanted["keys"][:MOST_LINES], wanted["unit"]
    legend = [(f"line s{index}", key) for index, key in enumerate(keys)]
    title = f"{wanted['title']}{f', {unit}' if unit else ''}"
    return chart(
        lambda size: _draw(keys, curves, size, titled=not wanted["is_further"]),
        label=title,
        legend=legend,
        sizes=[SMALL],
    )


def _draw(keys: Sequence[str], curves: Mapping[str, Any], size: Size, *, titled: bool) -> Plot:
    """`titled`: each point says its values."""
    x, width = curves["x"], curves["width"]
    columns = [[math.nan if value is None else value for value in curves["series"][key]["mean"]] for key in keys]
    last = x[-1] + (width - 1) / 2
    plot = Plot(size, x=step_span([last]), y=_span([value for column in columns for value in column]))
    plot.y_axis(lambda value: f"{value:.3g}")
    plot.x_axis("global step", step_ticks(0, last, most=size.ticks_across))
    for index, column in enumerate(columns):
        plot.line(zip(x, column, strict=True), f"line s{index}")
    for at, *values in zip(x, *columns, strict=True) if titled else ():
        said = ", ".join(f"{value:.4g}" for value in values if math.isfinite(value))
        first, end = at - width / 2, at + width / 2
        steps = f"step {at:.0f}" if width == 1 else f"mean of steps {first + 0.5:.0f} to {end - 0.5:.0f}"
        plot.hover([(first, end, f"{steps}: {said or 'none'}")])
    return plot


def _span(values: Sequence[float]) -> Span:
    """All of them, with a margin: a warm-up, or a spike, is what one looks for."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
