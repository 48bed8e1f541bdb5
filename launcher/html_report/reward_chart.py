"""The reward over the steps: steps that were kept, steps undone by a restore (paler), and what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from launcher.html_report.svg_chart import (
    DIAMOND,
    TOP,
    TRIANGLE,
    Chart,
    Plot,
    Size,
    chart,
    reward_span,
    step_span,
    step_ticks,
)
from launcher.reporting.downsample import Bin, Point, downsample, running_mean
from launcher.reporting.event_lines import incident_title
from launcher.reporting.run_facts import RunFacts
from launcher.reporting.run_view import mean_window
from launcher.run_log.incident_facts import IncidentFacts
from launcher.run_log.step_line import StepLine

DOTS = 400
"""Up to so many steps each has a dot; beyond, the range of each bin is a band."""
TITLE_LINES = 12
Legend = list[tuple[str, str]]


def reward_chart(facts: RunFacts) -> Chart | str:
    """The chart, or why there is none."""
    if not facts.steps and not facts.taken_back:
        return "No step was committed yet."
    legend: Legend = [("line", f"mean of {mean_window(len(facts.steps))} steps")]
    legend += [("dot", "a step's reward")] if len(facts.steps) <= DOTS else [("band", "lowest to highest")]
    legend += [("pale", "undone by a restore")] if facts.taken_back else []
    legend += [("eval", "held-out, sampled"), ("eval greedy", "held-out, greedy")] if facts.evals else []
    legend += [("restore", "restored to here")] if facts.restores else []
    legend += incident_legend(facts)
    legend += [("save", "checkpoint")] if facts.checkpoints else []
    return chart(lambda size: _draw(facts, size), label="Reward of each step", legend=legend)


def incident_legend(facts: RunFacts) -> Legend:
    """Entries for the kinds of incidents that there are."""
    over = [("mended", "incident, over")] if any(one.is_over for one in facts.incidents) else []
    return over + ([("open", "incident, not repaired")] if any(not one.is_over for one in facts.incidents) else [])


def _draw(facts: RunFacts, size: Size) -> Plot:
    lines = [*facts.steps, *(line for segment in facts.taken_back for line in segment)]
    steps = [line.step for line in lines] + [report.policy_version for report in facts.evals]
    evals = [value for one in facts.evals for value in (one.sampled, one.greedy, *chain(*one.by_dataset.values()))]
    plot = Plot(size, x=step_span(steps), y=reward_span([*(line.reward for line in lines), *evals]))
    plot.y_axis(lambda value: f"{value:g}")
    plot.x_axis("global step", step_ticks(0, max(steps), most=size.ticks_across))
    points = [(float(line.step), line.reward) for line in facts.steps]
    bins = downsample(points, size.points)
    plot.hover((one.first - 0.5, one.last + 0.5, _bin_text(one)) for one in bins)  # below what has titles of its own
    _draw_restores(facts, plot)
    for segment in facts.taken_back:
        _draw_taken_back(segment, plot)
    draw_rewards(points, plot)
    _draw_evals(facts, plot)
    _draw_checkpoints(facts, plot)
    _draw_incidents(facts.incidents, plot)
    return plot


def draw_rewards(points: Sequence[Point], plot: Plot) -> None:
    """Of (step, reward): a dot each or, of many, their range; and the mean of the last steps."""
    if len(points) <= DOTS:
        plot.dots(points, "dot")
    else:
        plot.band([(one.middle, one.low, one.high) for one in downsample(points, plot.size.points)], "band")
    plot.line(running_mean(points, mean_window(len(points)), plot.size.points), "line")


def _bin_text(one: Bin) -> str:
    if one.count == 1:
        return f"{one.steps_text}: reward {_reward(one.mean)}"
    return f"{one.steps_text}: reward {_reward(one.mean)} in the mean, {_reward(one.low)} to {_reward(one.high)}"


def _reward(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "none"


def _draw_taken_back(segment: Sequence[StepLine], plot: Plot) -> None:
    title = f"steps {segment[0].step} to {segment[-1].step}: undone by a restore"
    points = [(float(line.step), line.reward) for line in segment]
    if len(points) <= DOTS // 4:
        plot.dots(points, "pale")
    most = max(DOTS // 4, plot.size.points // 2)
    plot.line([(one.middle, one.mean) for one in downsample(points, most)], "pale", title=title)


def _draw_restores(facts: RunFacts, plot: Plot) -> None:
    for one in facts.restores:
        lost = f"{one.steps_back} step{'s' * (one.steps_back != 1)} undone" if one.steps_back else "no step lost"
        where = f"after step {one.step}" if one.step >= 0 else "at the beginning"
        plot.vertical(one.step + 0.5, "restore", title=f"continues {where}; {lost}; {one.reason}")


def _draw_evals(facts: RunFacts, plot: Plot) -> None:
    for name in ("sampled", "greedy"):
        points = [(float(report.policy_version), getattr(report, name)) for report in facts.evals]
        plot.line(points, f"eval {name}")
        for dataset in sorted({dataset for report in facts.evals for dataset in report.by_dataset}):
            those = [(report.policy_version, report.by_dataset.get(dataset)) for report in facts.evals]
            curve = [(float(version), pair[name == "greedy"]) for version, pair in those if pair is not None]
            plot.line(curve, f"eval {name}", title=f"held-out, {name}, {dataset}: {curve[-1][1]:.3f} at the end")
        for version, value in points:
            if math.isfinite(value):
                title = f"held-out, {name}: {value:.3f} at policy_version {version:.0f}"
                plot.marker(plot.px(version), plot.py(value), DIAMOND, f"eval {name}", title=title)


def _draw_checkpoints(facts: RunFacts, plot: Plot) -> None:
    """Ticks above the axis, at least 3 pixels apart, or a run that saves at each step draws a wall."""
    drawn = -10.0
    for one in facts.checkpoints:
        if abs(plot.px(one.step) - drawn) < 3:
            continue
        drawn = at = plot.px(one.step)
        css = "save bad" if one.fate in ("condemned", "damaged") else "save"
        title = f"checkpoint of step {one.step}" + (f": {one.fate}" if one.fate else "")
        plot.segment(at, plot.floor - 9, at, plot.floor, css, title=title)


def _draw_incidents(incidents: Sequence[IncidentFacts], plot: Plot) -> None:
    """A row above the plot; those that fall on one place share a sign, with their number."""
    groups: list[list[IncidentFacts]] = []
    for one in incidents:
        if groups and abs(plot.px(one.step) - plot.px(groups[-1][0].step)) < 12:
            groups[-1].append(one)
        else:
            groups.append([one])
    for group in groups:
        css = "mended" if all(one.is_over for one in group) else "open"
        plot.vertical(group[0].step, f"stem {css}", top=TOP - 4)
        at, title = plot.px(group[0].step), "\n".join(map(_incident_text, group[:TITLE_LINES]))
        plot.marker(at, TOP - 10, TRIANGLE, css, title=title)
        if len(group) > 1:
            plot.text(at, TOP - 16, str(len(group)), "tick mid")


def _incident_text(one: IncidentFacts) -> str:
    took = f" after {one.repaired_s:.1f} s" if one.repaired_s is not None else ""
    return f"incident {one.number} at step {one.step}: {incident_title(one.cause, one.subject)}; {one.outcome}{took}"
