"""The reward over the steps: what stands, what was taken back (paler), and what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.html_report.markup import NOTHING, Markup, join, tag
from launcher.html_report.plot import TOP, Plot, Size, chart, legend, span_of, step_ticks
from launcher.reporting.downsample import Stretch, downsample, running_mean
from launcher.reporting.event_lines import WHAT_HAPPENED
from launcher.reporting.incident_facts import IncidentFacts
from launcher.reporting.reward_curve import WINDOWS_ACROSS
from launcher.reporting.run_facts import RunFacts
from launcher.reporting.run_progress import MEAN_OVER_STEPS
from launcher.reporting.run_reader import StepLine

DOTS = 400
"""Up to so many steps each has a dot; beyond, the range of each stretch is a band."""


def reward_chart(facts: RunFacts) -> Markup:
    if not facts.steps and not facts.taken_back:
        return tag("p", "No step was committed yet.", class_="none")
    entries = [("line", f"mean of {_window(facts)} steps")]
    entries += [("dot", "a step's reward")] if len(facts.steps) <= DOTS else [("band", "lowest to highest")]
    entries += [("pale", "taken back by a restore")] if facts.taken_back else []
    entries += [("eval", "held-out, sampled"), ("eval greedy", "held-out, greedy")] if facts.evals else []
    entries += [("restore", "restored to here")] if facts.restores else []
    entries += incident_entries(facts)
    entries += [("save", "checkpoint")] if facts.checkpoints else []
    return join(chart(lambda size: _draw(facts, size), label="Reward of each step"), legend(*entries))


def incident_entries(facts: RunFacts) -> list[tuple[str, str]]:
    """Of the legend, as far as there are such."""
    mended = [("mended", "incident, mended")] if any(one.is_mended for one in facts.incidents) else []
    return mended + ([("open", "incident, not mended")] if any(not one.is_mended for one in facts.incidents) else [])


def _window(facts: RunFacts) -> int:
    return max(MEAN_OVER_STEPS, len(facts.steps) // WINDOWS_ACROSS)


def _draw(facts: RunFacts, size: Size) -> Markup:
    lines = [*facts.steps, *(line for segment in facts.taken_back for line in segment)]
    last = max([line.step for line in lines] + [report.policy_version for report in facts.evals] + [1])
    evals = [value for report in facts.evals for value in (report.sampled, report.greedy)]
    plot = Plot(size=size, x=(-0.01 * last, 1.01 * last), y=_reward_span([*(line.reward for line in lines), *evals]))
    frame = plot.frame(x_label="global step", x_ticks=step_ticks(last, size), y_text=lambda value: f"{value:g}")
    return join(
        frame,
        _strips(facts, plot, size),
        _restores(facts, plot),
        *(_pale(plot, segment, size) for segment in facts.taken_back),
        _standing(facts, plot, size),
        _evals(facts, plot),
        _checkpoints(facts, plot),
        _incidents(facts.incidents, plot),
    )


def _reward_span(values: Sequence[float]) -> tuple[float, float]:
    """From 0 to 1 where all is within, as accuracies and most rewards are; two runs then compare at a glance."""
    known = [value for value in values if math.isfinite(value)]
    return (-0.03, 1.03) if all(0 <= value <= 1 for value in known) else span_of(known)


def _standing(facts: RunFacts, plot: Plot, size: Size) -> Markup:
    steps = facts.steps
    points = [(float(line.step), line.reward) for line in steps]
    stretches = downsample(points, size.points)
    means = running_mean(points, _window(facts), size.points)
    parts = []
    if len(steps) <= DOTS:
        parts += [_dot(plot, x, value, "dot") for x, value in points if math.isfinite(value)]
    else:
        parts.append(tag("path", d=plot.area([(s.middle, s.low, s.high) for s in stretches]), class_="band"))
    parts.append(tag("path", d=plot.path(means), class_="line"))
    return join(*parts)


def _strips(facts: RunFacts, plot: Plot, size: Size) -> Markup:
    """Below all else, so that what lies above keeps its own titles."""
    stretches = downsample([(float(line.step), line.reward) for line in facts.steps], size.points)
    return plot.hover([(s.first - 0.5, s.last + 0.5, _say_stretch(s)) for s in stretches])


def _say_stretch(s: Stretch) -> str:
    if s.count == 1:
        return f"step {s.first:.0f}: reward {_say(s.mean)}"
    return f"steps {s.first:.0f} to {s.last:.0f}: reward {_say(s.mean)} in the mean, {_say(s.low)} to {_say(s.high)}"


def _say(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "none"


def _dot(plot: Plot, x: float, value: float, css: str) -> Markup:
    return tag("circle", cx=plot.px(x), cy=plot.py(value), r=2.2, class_=css)


def _pale(plot: Plot, segment: Sequence[StepLine], size: Size) -> Markup:
    stretches = downsample([(float(line.step), line.reward) for line in segment], size.points // 2)
    first, last = segment[0], segment[-1]
    title = tag("title", f"steps {first.step} to {last.step}: taken back by a restore")
    if len(segment) <= DOTS // 4:
        dots = [_dot(plot, line.step, line.reward, "pale") for line in segment if math.isfinite(line.reward)]
        path = tag("path", d=plot.path([(line.step, line.reward) for line in segment]), class_="pale")
        return tag("g", *dots, path, title)
    return tag("g", tag("path", d=plot.path([(s.middle, s.mean) for s in stretches]), class_="pale"), title)


def _restores(facts: RunFacts, plot: Plot) -> Markup:
    lines = []
    for one in facts.restores:
        lost = f"{one.steps_back} step{'s' * (one.steps_back != 1)} taken back" if one.steps_back else "no step lost"
        where = f"after step {one.step}" if one.step >= 0 else "at the beginning"
        lines.append(plot.vertical(one.step + 0.5, "restore", title=f"goes on {where}; {lost}; {one.reason}"))
    return join(*lines)


def _evals(facts: RunFacts, plot: Plot) -> Markup:
    marks = []
    for report in facts.evals:
        for name, value in (("sampled", report.sampled), ("greedy", report.greedy)):
            if math.isfinite(value):
                said = f"held-out, {name}: {value:.3f} at policy_version {report.policy_version}"
                marks.append(_diamond(plot, report.policy_version, value, f"eval {name}", said))
    paths = [
        tag("path", d=plot.path([(r.policy_version, getattr(r, name)) for r in facts.evals]), class_=f"eval {name}")
        for name in ("sampled", "greedy")
    ]
    return join(*paths, *marks) if facts.evals else NOTHING


def _diamond(plot: Plot, x: float, value: float, css: str, title: str) -> Markup:
    at, up = plot.px(x), plot.py(value)
    points = f"{at:.1f},{up - 5:.1f} {at + 5:.1f},{up:.1f} {at:.1f},{up + 5:.1f} {at - 5:.1f},{up:.1f}"
    return tag("polygon", tag("title", title), points=points, class_=css)


def _checkpoints(facts: RunFacts, plot: Plot) -> Markup:
    """Ticks above the axis; one for each stretch of pixels, or a run that saves at each step draws a wall."""
    marks, drawn = [], -10.0
    for one in facts.checkpoints:
        at = plot.px(one.step)
        if abs(at - drawn) < 3:
            continue
        drawn = at
        css = "save bad" if one.fate in ("condemned", "damaged") else "save"
        title = f"checkpoint of step {one.step}" + (f": {one.fate}" if one.fate else "")
        marks.append(tag("line", tag("title", title), x1=at, x2=at, y1=plot.floor - 9, y2=plot.floor, class_=css))
    return join(*marks)


def _incidents(incidents: Sequence[IncidentFacts], plot: Plot) -> Markup:
    """A lane above the plot; those that fall on one place share a sign, with their number."""
    lanes: list[tuple[float, list[IncidentFacts]]] = []
    for one in incidents:
        at = plot.px(one.step)
        if lanes and abs(at - lanes[-1][0]) < 12:
            lanes[-1][1].append(one)
        else:
            lanes.append((at, [one]))
    return join(*(_sign(at, group, plot) for at, group in lanes))


def _sign(at: float, group: Sequence[IncidentFacts], plot: Plot) -> Markup:
    css = "mended" if all(one.is_mended for one in group) else "open"
    top = TOP - 14.0
    points = f"{at - 6:.1f},{top:.1f} {at + 6:.1f},{top:.1f} {at:.1f},{top + 10:.1f}"
    signs = [
        tag("line", x1=at, x2=at, y1=top + 10, y2=plot.floor, class_=f"stem {css}"),
        tag("polygon", points=points, class_=css),
    ]
    if len(group) > 1:
        signs.append(tag("text", len(group), x=at, y=top - 2, class_="tick mid"))
    title = "\n".join(_say_incident(one) for one in group[:12])
    return tag("g", *signs, tag("title", title))


def _say_incident(one: IncidentFacts) -> str:
    end = "open" if one.is_mended is None else "not mended" if not one.is_mended else "mended"
    took = f" after {one.repaired_s:.1f} s" if one.repaired_s is not None else ""
    what = WHAT_HAPPENED.get(one.cause, "{subject} failed").replace("{subject}", one.subject)
    return f"incident {one.number} at step {one.step}: {what}; {end}{took}"
