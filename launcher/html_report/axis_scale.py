"""Range and ticks of a chart's axis."""

from __future__ import annotations

import math
from collections.abc import Iterable

from launcher.reporting.formats import clock_text

Span = tuple[float, float]
Ticks = list[tuple[float, str]]

TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)


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
