"""The ground of every chart: scales, ticks, axes, legend, and the thinning that keeps a long run's picture small.

A chart is drawn twice, wide and narrow, and the page's style shows the one that fits: one picture scaled to a phone
would have letters that nobody can read. Colours are classes, so that dark and light are the style's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.html_report.markup import Markup, join, tag

TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """In pixels of the drawing. `points`: how many of them a curve is thinned to."""

    name: str
    width: int
    height: int
    points: int
    ticks_across: int
    left: int = 50


WIDE = Size(name="wide", width=1040, height=300, points=400, ticks_across=10)
NARROW = Size(name="narrow", width=380, height=260, points=140, ticks_across=5)
RIGHT, TOP, BOTTOM = 14, 26, 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Maps values to places. `x` and `y` are (low, high) with low < high; what is outside of y is drawn at its edge."""

    size: Size
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def right(self) -> float:
        return self.size.width - RIGHT

    @property
    def floor(self) -> float:
        return self.size.height - BOTTOM

    def px(self, value: float) -> float:
        low, high = self.x
        left = self.size.left
        return left + (self.right - left) * (min(max(value, low), high) - low) / (high - low)

    def py(self, value: float) -> float:
        low, high = self.y
        return self.floor - (self.floor - TOP) * (min(max(value, low), high) - low) / (high - low)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """SVG's words for a line through the points, broken where one is not a number."""
        words, pen = [], "M"
        for x, y in points:
            if not math.isfinite(y):
                pen = "M"
                continue
            words.append(f"{pen}{self.px(x):.1f},{self.py(y):.1f}")
            pen = "L"
        return "".join(words)

    def area(self, rows: Sequence[tuple[float, float, float]]) -> str:
        """Between the lows and the highs of (x, low, high)."""
        known = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
        if len(known) < 2:
            return ""
        upper = [f"{self.px(x):.1f},{self.py(high):.1f}" for x, _, high in known]
        lower = [f"{self.px(x):.1f},{self.py(low):.1f}" for x, low, _ in reversed(known)]
        return f"M{'L'.join(upper)}L{'L'.join(lower)}Z"

    def frame(self, *, x_label: str, x_ticks: Sequence[tuple[float, str]], y_text: Callable[[float], str]) -> Markup:
        """Grid, ticks with their labels, and what is counted along the bottom."""
        parts = []
        for value in ticks(*self.y, most=5):
            y = self.py(value)
            parts.append(tag("line", x1=self.size.left, x2=self.right, y1=y, y2=y, class_="grid"))
            parts.append(tag("text", y_text(value), x=self.size.left - 7, y=y + 4, class_="tick end"))
        return join(*parts, self.bottom(x_label, x_ticks))

    def bottom(self, x_label: str, x_ticks: Sequence[tuple[float, str]]) -> Markup:
        parts = [tag("line", x1=self.size.left, x2=self.right, y1=self.floor, y2=self.floor, class_="axis")]
        for value, label in x_ticks:
            x = self.px(value)
            parts.append(tag("line", x1=x, x2=x, y1=self.floor, y2=self.floor + 4, class_="axis"))
            parts.append(tag("text", label, x=x, y=self.floor + 17, class_="tick mid"))
        parts.append(tag("text", x_label, x=self.right, y=self.size.height - 3, class_="tick end"))
        return join(*parts)

    def vertical(self, x: float, css: str, *, title: str) -> Markup:
        """A line over the whole height, and a broad one that can't be seen for the mouse to find."""
        at = self.px(x)
        line = {"x1": at, "x2": at, "y1": TOP, "y2": self.floor}
        hit = tag("line", **line, class_="hit")
        return tag("g", tag("line", **line, class_=css), hit, tag("title", title))

    def hover(self, rows: Sequence[tuple[float, float, str]]) -> Markup:
        """Strips over the plot, from x to x, each with its title."""
        strips = []
        for start, end, title in rows:
            left, right = self.px(start), self.px(end)
            strips.append(
                tag("rect", tag("title", title), x=left, y=TOP, width=max(right - left, 1.0), height=self.floor - TOP)
            )
        return tag("g", *strips, class_="strips")


def chart(draw: Callable[[Size], Markup], *, label: str, sizes: Sequence[Size] = (WIDE, NARROW)) -> Markup:
    """Both sizes of one picture. `label` is read out to whoever can't see it."""
    return join(
        *(
            tag(
                "svg", draw(size), viewBox=f"0 0 {size.width} {size.height}", class_=size.name, role="img",
                aria_label=label,
            )
            for size in sizes
        )
    )  # fmt: skip


def legend(*entries: tuple[str, str]) -> Markup:
    """(class of the sign, words)"""
    items = [tag("li", tag("i", class_=f"sign {css}"), words) for css, words in entries]
    return tag("ul", *items, class_="legend")


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers within [low, high], at most about `most`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next((step * power for step in TICK_STEPS if span / (step * power) <= most), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(count)]


def step_ticks(high: float, size: Size) -> list[tuple[float, str]]:
    whole = [value for value in ticks(0.0, max(high, 1.0), most=size.ticks_across) if value == int(value)]
    return [(value, f"{value:,.0f}") for value in whole]


def time_ticks(high_s: float, size: Size) -> list[tuple[float, str]]:
    step = next((step for step in TIME_STEPS_S if high_s / step <= size.ticks_across), None)
    step = step or math.ceil(high_s / size.ticks_across / 86_400) * 86_400
    return [(float(at), clock_text(at)) for at in range(0, int(high_s) + 1, step)]


def clock_text(seconds: float) -> str:
    """`0:45`, `12:30`, `3:20 h`, `2 d 4 h`"""
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 2 * 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def span_of(values: Iterable[float], *, otherwise: tuple[float, float] = (0.0, 1.0)) -> tuple[float, float]:
    """What an axis shows of `values`: all of them, unless a few lie so far out that the others would be a flat line."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return otherwise
    low, high = known[0], known[-1]
    inner_low, inner_high = known[len(known) // 50], known[-1 - len(known) // 50]
    room = max(inner_high - inner_low, abs(inner_high) * 1e-3, 1e-9)
    low, high = max(low, inner_low - 3 * room), min(high, inner_high + 3 * room)
    margin = max((high - low) * 0.06, abs(high) * 1e-3, 1e-9)
    return low - margin, high + margin
