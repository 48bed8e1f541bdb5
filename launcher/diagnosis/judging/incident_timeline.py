"""What happened, in order: the beginnings and ends of each kind of thing, the onset among them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.base.utc_offsets import Offsets
from launcher.diagnosis.judging.step_history import FoundFall
from launcher.diagnosis.reading.log_records import Contents, Kind, LogEvent
from launcher.diagnosis.reading.time_zones import say_time

MOST = 60
ONSET = "onset"
TOGETHER_STEPS = 10
"""Events of one kind no further apart are one entry."""
TOGETHER_S = 600.0
RARE = (
    Kind.CHECKPOINT,
    Kind.RESUMED,
    Kind.RECOVER_RUN,
    Kind.INCIDENT,
    Kind.SERVER_EXITED,
    Kind.OUT_OF_MEMORY,
    Kind.SERVER_READY,
    Kind.SERVER_LAUNCHED,
    Kind.CONDEMNED,
    Kind.RUN_ENDED,
)
"""Each is an entry of its own."""
LONG_PAUSE_S = 300.0
SHOWN_LESS = (Kind.CHECKPOINT, Kind.SERVER_READY, Kind.SERVER_LAUNCHED)
"""Where there are too many entries, these go first, but for those next to the onset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMoment:
    """An entry. `step`: the step under way, None where it is not known. `kind`: "onset" or a Kind's text."""

    step: int | None
    time: str
    seconds: float | None
    kind: str
    count: int
    text: str
    where: str = ""
    last_step: int | None = None


def timeline_of(contents: Contents, found: FoundFall | None) -> list[TimelineMoment]:
    """Everything, by time, where it is known, else by step."""
    moments = [_moment(group, contents.shown) for group in _groups(contents)]
    if found is not None:
        fall = found.fall
        text = f"the rewards begin to fall, {fall.shape}: {fall.before:.3g} → {fall.after:.3g}"
        moments.append(_moment_of_step(contents, int(found.rows[fall.onset]), ONSET, text))
        if fall.end is not None:
            moments.append(_moment_of_step(contents, int(found.rows[fall.end]), "came back", "the rewards are back"))
    return sorted(moments, key=_when)


def _moment_of_step(contents: Contents, row: int, kind: str, text: str) -> TimelineMoment:
    time = float(contents.steps.times[row])
    seconds = time if math.isfinite(time) else None
    return TimelineMoment(
        step=int(contents.steps.steps[row]),
        time=say_time(seconds, contents.shown),
        seconds=seconds,
        kind=kind,
        count=1,
        text=text,
    )


def in_brief(moments: Sequence[TimelineMoment]) -> list[TimelineMoment]:
    """As many as a person reads: checkpoints in a row are one entry, and what lies far from the onset goes first."""
    brief: list[TimelineMoment] = []
    for moment in moments:
        last = brief[-1] if brief else None
        if last is not None and moment.kind == last.kind == Kind.CHECKPOINT:
            brief[-1] = replace(
                last, count=last.count + moment.count, last_step=moment.last_step, text=moment.text, where=moment.where
            )
        else:
            brief.append(moment)
    return _few(brief, next((moment for moment in brief if moment.kind == ONSET), None))


def _groups(contents: Contents) -> Iterator[list[LogEvent]]:
    """Events of one kind that belong together."""
    open_groups: dict[Kind, list[LogEvent]] = {}
    for event in contents.log_events:
        if event.kind in (Kind.SILENCE, Kind.NO_TOKENS) and event.seconds < LONG_PAUSE_S:
            continue
        group = open_groups.get(event.kind)
        if group is not None and event.kind not in RARE and _near(group[-1], event):
            group.append(event)
            continue
        if group is not None:
            yield group
        open_groups[event.kind] = [event]
    yield from open_groups.values()


def _near(one: LogEvent, other: LogEvent) -> bool:
    if one.after_step is not None and other.after_step is not None:
        return abs(other.after_step - one.after_step) <= TOGETHER_STEPS
    last = one.last_time if one.last_time is not None else one.time
    return last is not None and other.time is not None and other.time - last <= TOGETHER_S


def _moment(group: list[LogEvent], shown: Offsets) -> TimelineMoment:
    first, last = group[0], group[-1]
    return TimelineMoment(
        step=_step_of(first),
        time=say_time(first.time, shown),
        seconds=first.time,
        kind=str(first.kind),
        count=sum(one.count for one in group),
        text=first.text,
        where=first.where,
        last_step=_step_of(last),
    )


def _step_of(event: LogEvent) -> int | None:
    """The step under way; of a checkpoint the step that it holds, where it says so."""
    step = event.facts.get("global_step")
    if event.kind is Kind.CHECKPOINT and isinstance(step, int):
        return step
    return None if event.after_step is None else event.after_step + 1


def _when(moment: TimelineMoment) -> tuple[float, float]:
    if moment.seconds is not None:
        return moment.seconds, 0.0
    return math.inf, float(moment.step if moment.step is not None else 0)


def _few(moments: list[TimelineMoment], onset: TimelineMoment | None) -> list[TimelineMoment]:
    if len(moments) <= MOST:
        return moments
    at = moments.index(onset) if onset is not None else len(moments) - 1
    dull = [i for i, m in enumerate(moments) if m.kind in {str(k) for k in SHOWN_LESS} and abs(i - at) > 6]
    gone = set(sorted(dull, key=lambda i: -abs(i - at))[: len(moments) - MOST])
    left = [m for i, m in enumerate(moments) if i not in gone]
    if len(left) <= MOST:
        return left
    at = left.index(onset) if onset is not None else len(left) - 1
    begin = max(0, min(at - MOST // 2, len(left) - MOST))
    return left[begin : begin + MOST]
