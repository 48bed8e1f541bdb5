"""The reward curve with its onset and what happened, as one inline SVG: no script, no font, no network.

Drawn for a width in pixels at which its text is 12 px high; a page holds one for wide screens and one for phones.
Colours are CSS variables of the page, so that it follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launcher.diagnosis.judging.onset import usual_range

Point = tuple[float, float]

LEFT, RIGHT, TOP = 84.0, 12.0, 26.0
PLOT_HEIGHT, LANE_HEIGHT, AXIS_HEIGHT = 240.0, 20.0, 24.0
MOST_POINTS = 900
TICKS = 5
LABEL_WIDTH = 110.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at `step` (until `last_step`). `tone`: a CSS variable's name: bad, warn, good, calm."""

    step: int
    text: str
    tone: str = "calm"
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks below the curve."""

    name: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """`points`: rewards of the steps that stand; `taken_back`: of those that a recovery undid. `onset`, `earliest`,
    `latest`: steps; None where there is none. `level`: the reward before the onset. `chosen`: the checkpoint to go
    back to."""

    points: Sequence[Point]
    taken_back: Sequence[Point] = ()
    lanes: Sequence[Lane] = ()
    onset: int | None = None
    earliest: int | None = None
    latest: int | None = None
    level: float | None = None
    chosen: int | None = None
    title: str = "reward by global step"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    width: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = min(max(value, self.y_low), self.y_high)
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * PLOT_HEIGHT


def draw(picture: Picture, width: int = 960) -> str:
    """The SVG element."""
    frame = _frame(picture, width)
    height = TOP + PLOT_HEIGHT + AXIS_HEIGHT + LANE_HEIGHT * len(picture.lanes) + 8
    parts = [
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(picture.title)}">',
        *_grid(frame),
        *_onset(picture, frame, height),
        *_chosen(picture, frame, height),
        *_dots(picture.taken_back, frame, "taken"),
        *_dots(picture.points, frame, "dot"),
        *_line(picture.points, frame),
        *_lanes(picture, frame),
        "</svg>",
    ]
    return "".join(parts)


def _frame(picture: Picture, width: int) -> _Frame:
    everything = [*picture.points, *picture.taken_back]
    steps = [step for step, _ in everything] + [mark.step for lane in picture.lanes for mark in lane.marks]
    values = [value for _, value in everything if math.isfinite(value)] or [0.0, 1.0]
    least, most = usual_range(np.array(values))
    values = [min(max(value, least), most) for value in values]
    low, high = min(0.0, *values), max(values)
    high = 1.0 if low >= 0 and 0.3 < high <= 1 else high + 0.05 * (high - low or 1.0)
    first, last = min(steps, default=0), max(steps, default=1)
    return _Frame(width=width, x_low=first, x_high=max(last, first + 1), y_low=low, y_high=high)


def _grid(frame: _Frame) -> list[str]:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in ticks(frame.x_low, frame.x_high, whole=True):
        x = frame.x(step)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 16:.1f}" text-anchor="middle">{step:g}</text>'
        )
    return parts


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round values within the range, about five."""
    rough = (high - low) / TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _onset(picture: Picture, frame: _Frame, height: float) -> list[str]:
    if picture.onset is None:
        return []
    left = frame.x(picture.earliest if picture.earliest is not None else picture.onset)
    right = frame.x(picture.latest if picture.latest is not None else picture.onset)
    x, bottom = frame.x(picture.onset), height - 8
    anchor = "end" if x > 0.6 * frame.width else "start"
    at = x - 6 if anchor == "end" else x + 6
    parts = [
        f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{max(right - left, 1.5):.1f}" '
        f'height="{bottom - TOP:.1f}"/>',
        f'<line class="onset" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom:.1f}"/>',
        f'<text class="said bad" x="{at:.1f}" y="{TOP - 10}" text-anchor="{anchor}">onset: step {picture.onset}</text>',
    ]
    if picture.level is not None:
        y = frame.y(picture.level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return parts


def _chosen(picture: Picture, frame: _Frame, height: float) -> list[str]:
    if picture.chosen is None:
        return []
    x = frame.x(max(picture.chosen, frame.x_low))
    room = (frame.width if picture.onset is None or picture.onset < picture.chosen else frame.x(picture.onset)) - x
    anchor = "end" if room < LABEL_WIDTH and x - LEFT > LABEL_WIDTH else "start"
    at = x - 6 if anchor == "end" else x + 6
    return [
        f'<line class="chosen" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 8:.1f}"/>',
        f'<text class="said good" x="{at:.1f}" y="{TOP + PLOT_HEIGHT - 8}" text-anchor="{anchor}">'
        f"go back to {picture.chosen}</text>",
    ]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """So many points at most: of each stretch the lowest and the highest, so that no spike is lost."""
    kept = [point for point in points if math.isfinite(point[1])]
    if len(kept) <= most:
        return kept
    width = -(-2 * len(kept) // most)
    groups = (kept[i : i + width] for i in range(0, len(kept), width))
    return [p for g in groups for p in sorted({min(g, key=lambda q: q[1]), max(g, key=lambda q: q[1])})]


def _dots(points: Sequence[Point], frame: _Frame, name: str) -> list[str]:
    return [
        f'<circle class="{name}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="2"/>'
        for step, value in thinned(points)
    ]


def _line(points: Sequence[Point], frame: _Frame) -> list[str]:
    """The mean over the last steps, broken at nothing: it shows the level."""
    kept = [point for point in points if math.isfinite(point[1])]
    if len(kept) < 2:
        return []
    window = max(5, len(kept) // 100)
    sums = [0.0]
    for _, value in kept:
        sums.append(sums[-1] + min(max(value, frame.y_low), frame.y_high))
    means = [
        (step, (sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1)) for i, (step, _) in enumerate(kept)
    ]
    path = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in thinned(means))
    return [f'<polyline class="mean" points="{path}"/>']


def _lanes(picture: Picture, frame: _Frame) -> list[str]:
    parts = []
    for number, lane in enumerate(picture.lanes):
        y = TOP + PLOT_HEIGHT + AXIS_HEIGHT + LANE_HEIGHT * (number + 0.5)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for mark in lane.marks:
            left, right = frame.x(mark.step), frame.x(mark.last_step if mark.last_step is not None else mark.step)
            parts.append(
                f'<rect class="mark {mark.tone}" x="{left - 2.5:.1f}" y="{y - 5:.1f}" '
                f'width="{max(right - left, 0) + 5:.1f}" height="10" rx="2"><title>{escape(mark.text)}</title></rect>'
            )
        parts.append(f'<text class="lane" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(lane.name)}</text>')
    return parts
