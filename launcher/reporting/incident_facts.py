"""Each incident with its times: when it began, was reported, was over, and when the next step was committed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.reporting.line_values import as_float, as_integer, as_unix_time
from launcher.reporting.run_reader import RunData, StepLine
from launcher.run_files.journal import Record

HANGS = frozenset({"server_hang", "trainer_hang"})
SILENCES = (
    *("stopped", "asleep", "unanswered", "does not answer"),
    *("without a token", "no token for anybody", "no token", "no progress"),
)
SILENCE = re.compile(rf"(?:{'|'.join(SILENCES)}) for (\d+(?:\.\d+)?) s")
"""How launcher/policy/liveness.py and trainer_liveness.py report how long there was no sign of life."""
LONGEST_S = 86_400.0
"""A beginning further back than a day is another clock's."""
OF_LEARNING = frozenset({"reward_collapse", "verifier_broken", "nonfinite", "server_corrupt", "server_stale"})
"""Causes by which steps may have been trained on bad data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFacts:
    """Times are unix seconds, durations seconds since `began_at`. None: not known, or not (yet) so.

    `is_mended` None: it is open. `steps_back`: committed steps that a restore for it undid.
    """

    number: int
    cause: str
    subject: str
    what: str
    doing: str
    step: int
    onset_step: int | None
    began_at: float
    reported_at: float
    ended_at: float | None
    is_mended: bool | None
    end_reason: str
    detected_s: float
    repaired_s: float | None
    next_step_s: float | None
    steps_back: int
    batches_rejected: int
    actions: tuple[str, ...]
    has_folder: bool


def incidents_of(
    data: RunData, *, steps_back: Mapping[int, int], folders: frozenset[int], say: Callable[[Record], str]
) -> tuple[IncidentFacts, ...]:
    """By number; the first beginning and the last end of each count."""
    began: dict[int, Record] = {}
    ended: dict[int, Record] = {}
    deaths: dict[int, float] = {}
    joined: Counter[int] = Counter()
    for event in data.events:
        number = as_integer(event.get("incident"))
        if number is None:
            continue
        match event.get("event"):
            case "incident.began":
                began.setdefault(number, event)
            case "incident.ended":
                ended[number] = event
            case "incident.joined":
                joined[number] += 1
            case "server.died":
                deaths.setdefault(number, max(as_float(event.get("detected_after_s"), 0.0), 0.0))
    times = [line.time for line in data.steps]
    found = []
    for number, event in sorted(began.items()):
        onset = _onset(event, deaths.get(number, 0.0), data.steps, times)
        end = ended.get(number)
        found.append(
            _facts(
                number, event, end, onset, data.steps, times,
                steps_back=steps_back.get(number, 0), rejected=joined[number], folders=folders, what=say(event),
            )
        )  # fmt: skip
    return tuple(found)


def _facts(
    number: int,
    event: Record,
    end: Record | None,
    onset: float,
    lines: Sequence[StepLine],
    times: Sequence[float],
    *,
    steps_back: int,
    rejected: int,
    folders: frozenset[int],
    what: str,
) -> IncidentFacts:
    reported_at = as_unix_time(event.get("time"))
    is_mended = None if end is None else end.get("is_mended") is True
    ended_at = None if end is None else as_unix_time(end.get("time"))
    # With bad data, the steps until it was reported are no evidence of anything.
    later = bisect_right(times, reported_at if event.get("cause") in OF_LEARNING else onset)
    actions = None if end is None else end.get("actions")
    return IncidentFacts(
        number=number,
        cause=str(event.get("cause") or "unknown"),
        subject=str(event.get("subject") or ""),
        what=what,
        doing=str(event.get("doing") or ""),
        step=_shown_at(event, lines, bisect_right(times, reported_at)),
        onset_step=as_integer(event.get("onset_step")),
        began_at=onset,
        reported_at=reported_at,
        ended_at=ended_at,
        is_mended=is_mended,
        end_reason="" if end is None else str(end.get("reason") or ""),
        detected_s=reported_at - onset,
        repaired_s=ended_at - onset if ended_at is not None and is_mended else None,
        next_step_s=times[later] - onset if later < len(times) else None,
        steps_back=steps_back,
        batches_rejected=rejected,
        actions=tuple(map(str, actions)) if isinstance(actions, list) else (),
        has_folder=number in folders,
    )


def _onset(event: Record, death_s: float, lines: Sequence[StepLine], times: Sequence[float]) -> float:
    """The earliest known: the observer's `at`, the death that its guard saw, the last sign of life of what hangs, the
    commit of the first bad step."""
    reported_at = as_unix_time(event.get("time"))
    since_s = as_float(event.get("monotonic")) - as_float(event.get("at"))
    candidates = [reported_at - death_s]
    if event.get("cause") in HANGS:
        candidates += [reported_at - float(said) for said in SILENCE.findall(str(event.get("reason")))]
    if 0 <= since_s < LONGEST_S:
        candidates.append(reported_at - since_s)
    onset_step = as_integer(event.get("onset_step"))
    if onset_step is not None and event.get("cause") in OF_LEARNING:
        for index in range(bisect_right(times, reported_at) - 1, -1, -1):
            if lines[index].step == onset_step:
                candidates.append(times[index])
                break
            if lines[index].step < onset_step:
                break
    return min(candidates)


def _shown_at(event: Record, lines: Sequence[StepLine], before: int) -> int:
    """On the curve: the step that was under way when it was reported, or at which it began."""
    onset = as_integer(event.get("onset_step"))
    if onset is not None:
        return max(onset, 0)
    return lines[before - 1].step + 1 if before else 0
