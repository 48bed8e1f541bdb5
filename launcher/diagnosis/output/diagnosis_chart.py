"""The reward curve of a diagnosis: its onset, the checkpoint to go back to, and lanes of what the logs report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from launcher.diagnosis.judging.incident_timeline import TimelineMoment
from launcher.diagnosis.judging.verdict import Diagnosis, Onset
from launcher.diagnosis.reading.log_records import FAILED, REWARD, Kind
from launcher.html_report.reward_chart import DOTS, draw_rewards
from launcher.html_report.svg_chart import NARROW, TOP, WIDE, Chart, Plot, Size, chart, reward_span, step_ticks
from launcher.reporting.downsample import downsample

LEFT, LABEL_WIDTH = 84, 110
MOST_MARKS = 500
LANES = {
    "checkpoints": (Kind.CHECKPOINT, Kind.CONDEMNED),
    "connections": FAILED,
    "servers": (Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION, Kind.SERVER_WATCHDOG, Kind.SERVER_UNHEALTHY, Kind.SILENCE,
                Kind.NO_TOKENS, Kind.SERVER_READY, Kind.SERVER_LAUNCHED),
    "memory": (Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY, Kind.OTHER_KILLED),
    "rewards": (Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR),
    "restarts": (Kind.RECOVER_RUN, Kind.RESUMED, Kind.INCIDENT, Kind.TRAINER_FAILED, Kind.KILLED, Kind.RUN_ENDED),
}  # fmt: skip
COLOURS = {
    **dict.fromkeys(LANES["connections"], "warn"),
    **dict.fromkeys(LANES["servers"], "bad"),
    **dict.fromkeys(LANES["memory"], "bad"),
    **dict.fromkeys(LANES["rewards"], "warn"),
    Kind.SERVER_READY: "good", Kind.SERVER_LAUNCHED: "good", Kind.CONDEMNED: "bad", Kind.RESUMED: "good",
    Kind.INCIDENT: "bad", Kind.TRAINER_FAILED: "bad", Kind.KILLED: "bad",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """What happened at step `first` until `last`. `css`: bad, warn, good or calm."""

    first: int
    last: int
    text: str
    css: str = "calm"


def diagnosis_chart(diagnosis: Diagnosis) -> Chart | None:
    """None where the logs have no step."""
    if not len(diagnosis.contents.steps):
        return None
    lanes = {name: marks for name in LANES if (marks := list(_marks(diagnosis, name)))}
    sizes = [replace(size, left=LEFT) for size in (WIDE, NARROW)]
    return chart(partial(_draw, diagnosis, lanes), label="reward by global step", sizes=sizes)


def _marks(diagnosis: Diagnosis, lane: str) -> Iterator[ChartMark]:
    kinds = {str(kind): kind for kind in LANES[lane]}
    last_step = int(max(diagnosis.contents.steps.steps))
    marks = [_mark(one, kinds[one.kind], last_step) for one in diagnosis.timeline if one.kind in kinds]
    if lane == "checkpoints":
        known = {mark.first for mark in marks}
        steps = [checkpoint.global_step for checkpoint in diagnosis.folders.checkpoints]
        steps = [step for step in steps if step not in known and step <= last_step]
        marks += [ChartMark(first=step, last=step, text=f"checkpoint of step {step}") for step in steps]
    yield from marks[:: max(-(-len(marks) // MOST_MARKS), 1)]


def _mark(one: TimelineMoment, kind: Kind, last_step: int) -> ChartMark:
    first = min(one.step or 0, last_step)
    last = first if one.last_step is None else min(one.last_step, last_step)
    times = f", {one.count:,} times" if one.count > 1 else ""
    text = f"step {first}: {one.kind}{times}. {one.text}"
    return ChartMark(first=first, last=last, text=text, css=COLOURS.get(kind, "calm"))


def _draw(diagnosis: Diagnosis, lanes: dict[str, list[ChartMark]], size: Size) -> Plot:
    steps = diagnosis.contents.steps
    numbers, rewards = [float(step) for step in steps.steps], steps.column(REWARD).tolist()
    kept = set(diagnosis.passes[-1].rows.tolist()) if diagnosis.passes else set()
    points = [(numbers[row], reward) for row, reward in enumerate(rewards) if row in kept]
    taken_back = [(numbers[row], reward) for row, reward in enumerate(rewards) if row not in kept]
    first, last = min(numbers), max(numbers)
    plot = Plot(size, x=(first, max(last, first + 1)), y=reward_span(rewards), lanes=list(lanes))
    plot.y_axis(lambda value: f"{value:g}")
    plot.x_axis("global step", step_ticks(first, last, most=size.ticks_across))
    if diagnosis.onset is not None:
        _draw_onset(diagnosis.onset, plot)
    advice = diagnosis.restore_advice
    if advice is not None and advice.checkpoint is not None:
        _draw_restore(advice.checkpoint.global_step, diagnosis.onset, plot)
    plot.dots([(one.middle, one.mean) for one in downsample(taken_back, DOTS)], "pale")
    draw_rewards(points, plot)
    for row, marks in enumerate(lanes.values()):
        for mark in marks:
            plot.bar(mark.first, mark.last, f"mark {mark.css}", title=mark.text, row=row)
    return plot


def _draw_onset(onset: Onset, plot: Plot) -> None:
    x, left, right = plot.px(onset.step), plot.px(onset.earliest), plot.px(onset.latest)
    height = plot.height - TOP
    plot.add("rect", "onset range", x=left, y=TOP, width=max(right - left, 1.5), height=height)
    plot.vertical(onset.step, "onset", top=TOP - 8, bottom=plot.height)
    _draw_label(x, TOP - 10, f"onset: step {onset.step}", "bad", plot, is_left=x > 0.6 * plot.size.width)
    plot.segment(plot.left, plot.py(onset.before), plot.right, plot.py(onset.before), "level")


def _draw_restore(step: int, onset: Onset | None, plot: Plot) -> None:
    x = plot.px(step)
    room = (plot.size.width if onset is None or onset.step < step else plot.px(onset.step)) - x
    plot.vertical(step, "chosen", bottom=plot.height)
    is_left = room < LABEL_WIDTH < x - plot.left
    _draw_label(x, plot.floor - 8, f"go back to {step}", "good", plot, is_left=is_left)


def _draw_label(x: float, y: float, text: str, css: str, plot: Plot, *, is_left: bool) -> None:
    """Beside a vertical line, on the side where there is room."""
    plot.text(x - 6 if is_left else x + 6, y, text, f"label {css}{' end' if is_left else ''}")
