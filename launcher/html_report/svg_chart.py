"""Charts of series, marks and lanes as SVG, for report.html and for the page of a diagnosis.

A chart is drawn twice, wide and narrow, and the page's style shows the one that fits: one picture scaled to a phone
would have letters that nobody can read. Colours are CSS classes, so that dark and light are up to the style alone.
`page.html.j2` writes the shapes as elements and escapes what they hold. Matplotlib's SVG needs twice the time of the
complete page for charts without titles and without a dark form; so only the PNG pictures are drawn by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.base.wording import in_one_line
from launcher.reporting.downsample import Point
from launcher.reporting.formats import clock_text

Span = tuple[float, float]
Ticks = list[tuple[float, str]]
TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)
RIGHT, TOP, BOTTOM = 14, 26, 34
LANE, LEAST_BAR, LABEL_LETTERS = 22, 4.0, 13
DIAMOND = ((0, -5), (5, 0), (0, 5), (-5, 0))
TRIANGLE = ((-6, -4), (6, -4), (0, 6))


class SvgShape(NamedTuple):
    """An SVG element; `title` is what a browser shows when the mouse is over it."""

    element: str
    attributes: dict[str, object]
    title: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """In pixels of the drawing. `points`: how many of them a curve is downsampled to."""

    name: str
    width: int
    height: int
    points: int
    ticks_across: int
    left: int = 50


WIDE = Size(name="wide", width=1040, height=300, points=400, ticks_across=10)
NARROW = Size(name="narrow", width=380, height=260, points=140, ticks_across=5)


class Plot:
    """One drawing. Maps values to pixels and collects shapes; what lies outside of x or y is drawn at its edge."""

    def __init__(self, size: Size, *, x: Span, y: Span = (0.0, 1.0), lanes: Sequence[str] = ()) -> None:
        """`x` and `y` are (low, high) with low < high. `lanes` are named rows below the axis."""
        self.size, self.x, self.y = size, x, y
        self.left, self.right = size.left, size.width - RIGHT
        self.floor = size.height - BOTTOM
        self.height = size.height + LANE * len(lanes)
        self.shapes: list[SvgShape] = []
        for row, name in enumerate(lanes):
            middle = self.lane_top(row) + 8
            self.segment(self.left, middle, self.right, middle, "grid")
            shown = in_one_line(name, longest=LABEL_LETTERS)
            self.text(self.left - 7, middle + 4, shown, "tick end", title=name if shown != name else "")

    def px(self, value: float) -> float:
        low, high = self.x
        return self.left + (self.right - self.left) * (min(max(value, low), high) - low) / (high - low)

    def py(self, value: float) -> float:
        low, high = self.y
        return self.floor - (self.floor - TOP) * (min(max(value, low), high) - low) / (high - low)

    def lane_top(self, row: int) -> float:
        return self.size.height + LANE * row

    def add(self, element: str, css: str, /, *, title: str = "", text: str = "", **attributes: object) -> None:
        """Numbers are written to a tenth of a pixel: more digits are bytes that nobody sees."""
        numbers = {key: round(value, 1) if isinstance(value, float) else value for key, value in attributes.items()}
        self.shapes.append(SvgShape(element, {"class": css or None, **numbers}, title, text))

    def text(self, x: float, y: float, text: str, css: str, *, title: str = "") -> None:
        self.add("text", css, x=x, y=y, text=text, title=title)

    def segment(self, x1: float, y1: float, x2: float, y2: float, css: str, *, title: str = "") -> None:
        self.add("line", css, x1=x1, y1=y1, x2=x2, y2=y2, title=title)

    def y_axis(self, say: Callable[[float], str]) -> None:
        """A grid with labels."""
        for value in ticks(*self.y, most=5):
            y = self.py(value)
            self.segment(self.left, y, self.right, y, "grid")
            self.text(self.left - 7, y + 4, say(value), "tick end")

    def x_axis(self, label: str, marks: Ticks) -> None:
        self.segment(self.left, self.floor, self.right, self.floor, "axis")
        for value, text in marks:
            x = self.px(value)
            self.segment(x, self.floor, x, self.floor + 4, "axis")
            self.text(x, self.floor + 17, text, "tick mid")
        self.text(self.right, self.size.height - 3, label, "tick end")

    def line(self, points: Iterable[Point], css: str, *, title: str = "") -> None:
        """A line through the points, broken where one is not a number."""
        words, pen = [], "M"
        for x, y in points:
            if not math.isfinite(y):
                pen = "M"
                continue
            words.append(f"{pen}{self.px(x):.1f},{self.py(y):.1f}")
            pen = "L"
        self.add("path", css, d="".join(words), title=title)

    def band(self, rows: Sequence[tuple[float, float, float]], css: str) -> None:
        """The area between the lows and the highs of (x, low, high)."""
        known = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
        upper = [f"{self.px(x):.1f},{self.py(high):.1f}" for x, _, high in known]
        lower = [f"{self.px(x):.1f},{self.py(low):.1f}" for x, low, _ in reversed(known)]
        if len(known) > 1:
            self.add("path", css, d=f"M{'L'.join(upper)}L{'L'.join(lower)}Z")

    def dots(self, points: Iterable[Point], css: str) -> None:
        for x, y in points:
            if math.isfinite(y):
                self.add("circle", css, cx=self.px(x), cy=self.py(y), r=2.2)

    def marker(self, x: float, y: float, form: Sequence[tuple[int, int]], css: str, *, title: str) -> None:
        """`x` and `y` in pixels."""
        self.add("polygon", css, points=" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in form), title=title)

    def vertical(self, x: float, css: str, *, title: str = "", top: float = TOP, bottom: float | None = None) -> None:
        """A line over the height, and with a title a broad one that can't be seen for the mouse to find."""
        at, end = self.px(x), self.floor if bottom is None else bottom
        self.segment(at, top, at, end, css)
        if title:
            self.segment(at, top, at, end, "hit", title=title)

    def bar(self, start: float, end: float, css: str, *, title: str, row: int) -> None:
        """From x to x in a lane, never too small to be seen."""
        left, right = self.px(start), self.px(end)
        width = max(right - left, LEAST_BAR)
        self.add(
            "rect",
            css,
            x=(left + right - width) / 2,
            y=self.lane_top(row),
            width=width,
            height=LANE - 6,
            rx=2,
            title=title,
        )

    def hover(self, rows: Iterable[tuple[float, float, str]]) -> None:
        """Strips over the plot, from x to x, each with its title."""
        for start, end, title in rows:
            left, right = self.px(start), self.px(end)
            self.add("rect", "", x=left, y=TOP, width=max(right - left, 1.0), height=self.floor - TOP, title=title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`label` is for screen readers; `legend` holds (class of the sign, text)."""

    label: str
    plots: tuple[Plot, ...]
    legend: tuple[tuple[str, str], ...] = ()


def chart(
    draw: Callable[[Size], Plot],
    *,
    label: str,
    legend: Iterable[tuple[str, str]] = (),
    sizes: Iterable[Size] = (WIDE, NARROW),
) -> Chart:
    """All sizes of one picture."""
    return Chart(label=label, plots=tuple(map(draw, sizes)), legend=tuple(legend))


# ── range and ticks of an axis ──


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers within [low, high], at most about `most`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next((step * power for step in TICK_STEPS if span / (step * power) <= most), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [(first + index) * step for index in range(math.floor(high / step + 1e-9) - first + 1)]


def step_ticks(low: float, high: float, *, most: int) -> Ticks:
    """Integers only."""
    return [(at, f"{at:,.0f}") for at in ticks(low, max(high, low + 1), most=most) if at == int(at)]


def time_ticks(high_s: float, *, most: int) -> Ticks:
    step = next((step for step in TIME_STEPS_S if high_s / step <= most), None)
    step = step or math.ceil(high_s / most / 86_400) * 86_400
    return [(float(at), clock_text(at)) for at in range(0, int(high_s) + 1, step)]


def step_span(steps: Iterable[float]) -> Span:
    """From step 0 to the last one, with a small margin."""
    last = max([1.0, *steps])
    return -0.01 * last, 1.01 * last


def value_span(values: Iterable[float]) -> Span:
    """Range that shows all of `values`, unless a few lie so far out that the others would be a flat line."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return 0.0, 1.0
    low, high = known[0], known[-1]
    inner_low, inner_high = known[len(known) // 50], known[-1 - len(known) // 50]
    room = max(inner_high - inner_low, abs(inner_high) * 1e-3, 1e-9)
    low, high = max(low, inner_low - 3 * room), min(high, inner_high + 3 * room)
    margin = max((high - low) * 0.06, abs(high) * 1e-3, 1e-9)
    return low - margin, high + margin


def reward_span(values: Iterable[float]) -> Span:
    """From 0 to 1 where all is within, as accuracies and most rewards are: two runs then compare at a glance."""
    known = [value for value in values if math.isfinite(value)]
    return (-0.03, 1.03) if all(0 <= value <= 1 for value in known) else value_span(known)
