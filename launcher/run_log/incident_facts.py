"""Each incident with its times: when it began, was reported, was over, and when the next step was committed."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.policy.restore import SEEN_IN_THE_NEXT_STEP
from launcher.run_files.journal import Record
from launcher.run_files.run_order import Place
from launcher.run_log.line_values import as_float, as_integer, as_unix_time
from launcher.run_log.step_line import StepLine

HANGS = frozenset({"server_hang", "trainer_hang"})
SILENCES = (
    *("stopped", "asleep", "unanswered", "does not answer"),
    *("without a token", "no token for anybody", "no token", "no progress"),
)
SILENCE = re.compile(rf"(?:{'|'.join(SILENCES)}) for (\d+(?:\.\d+)?) s")
"""How launcher/policy/liveness.py and trainer_liveness.py report how long there was no sign of life."""
LONGEST_S = 86_400.0
"""A beginning further back than a day is another clock's."""
Span = tuple[int, int]
"""The first of some lines, and the one behind the last."""
OF_LEARNING = frozenset({"reward_collapse", "verifier_broken", "nonfinite", "server_corrupt", "server_stale"})
"""Causes by which steps may have been trained on bad data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFacts:
    """Times are unix seconds, durations seconds since `began_at`. None: not known, or not (yet) so.

    `is_mended` None: it is open. `later_attempt`: it ended unrepaired, and this attempt trained on. `steps_back`:
    committed steps that a restore for it undid. `lines_before`: lines of steps that were written when it was reported.
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
    later_attempt: int | None
    end_reason: str
    detected_s: float
    repaired_s: float | None
    next_step_s: float | None
    steps_back: int
    lines_before: int
    batches_rejected: int
    actions: tuple[str, ...]
    has_folder: bool

    @property
    def is_over(self) -> bool:
        return self.is_mended is True or self.later_attempt is not None

    @property
    def outcome(self) -> str:
        if self.later_attempt is not None:
            return f"over, as attempt {self.later_attempt} trained on"
        return "open" if self.is_mended is None else "repaired" if self.is_mended else "not repaired"


@dataclass(slots=True, kw_only=True)
class RecordedIncident:
    """What the journal says of an incident: the first beginning and the last end count."""

    number: int
    began: Record | None = None
    place: Place = None
    ended: Record | None = None
    death_s: float | None = None  # how long before its report its host saw the death of the process
    batches_rejected: int = 0
    restored_to: int | None = None  # the earliest step that the trainer was taken back to since it began

    @property
    def is_mended(self) -> bool | None:
        """None: it is open."""
        return None if self.ended is None else self.ended.get("is_mended") is True


def incidents_of(
    recorded: Iterable[RecordedIncident],
    lines: Sequence[StepLine],
    *,
    steps_back: Mapping[int, int],
    folders: frozenset[int],
    say: Callable[[Record], str],
) -> tuple[IncidentFacts, ...]:
    """By number. `steps_back`: by number, what restores undid. `say`: what happened, of the event of its beginning."""
    times = StepTimes(lines)
    return tuple(
        _facts(one, one.began, times, steps_back=steps_back.get(one.number, 0), folders=folders, what=say(one.began))
        for one in sorted(recorded, key=lambda one: one.number)
        if one.began is not None
    )


class StepTimes:
    """The lines of steps with their times, which are in order only between two restores: a clock may be set."""

    def __init__(self, lines: Sequence[StepLine]) -> None:
        self.lines = lines
        self.times = [line.time for line in lines]
        self._places: list[tuple[int, ...]] = [(line.attempt,) for line in lines]
        self._first_steps: dict[int, int] = {}
        for line in lines:
            self._first_steps.setdefault(line.attempt, line.step)
        self._have_lineage = all(line.lineage is not None for line in lines)
        if self._have_lineage:
            self._places = [(line.attempt, line.lineage or 0) for line in lines]

    def span_of(self, attempt: int | None, place: Place) -> Span:
        """Between which lines something was written that was written after a restore and before the next one; as far
        as that is known."""
        here = place if self._have_lineage else None if attempt is None else (attempt,)
        if here is None:
            return 0, len(self.lines)
        return bisect_left(self._places, here), bisect_right(self._places, here)

    def attempt_beyond(self, event: Record) -> int | None:
        """The first attempt that trained after an incident's, from weights that don't hold its damage."""
        attempt, onset, cause = (
            as_integer(event.get("attempt")),
            as_integer(event.get("onset_step")),
            event.get("cause"),
        )
        damaged = math.inf if onset is None else onset - 1 if cause in SEEN_IN_THE_NEXT_STEP else onset
        if attempt is None:
            return None
        firsts = self._first_steps.items()
        return next((one for one, first in firsts if one > attempt and first <= damaged), None)

    def before(self, time: float, span: Span) -> int:
        """How many lines were written before a time within a span."""
        return bisect_right(self.times, time, *span)


def _facts(
    one: RecordedIncident,
    event: Record,
    lines: StepTimes,
    *,
    steps_back: int,
    folders: frozenset[int],
    what: str,
) -> IncidentFacts:
    span = lines.span_of(as_integer(event.get("attempt")), one.place)
    onset = _onset(event, one.death_s or 0.0, lines, span)
    reported_at = as_unix_time(event.get("time"))
    end, is_mended = one.ended, one.is_mended
    ended_at = None if end is None else as_unix_time(end.get("time"))
    # With bad data, the steps until it was reported are no evidence of anything.
    later = lines.before(reported_at if event.get("cause") in OF_LEARNING else onset, span)
    before = lines.before(reported_at, span)
    actions = None if end is None else end.get("actions")
    return IncidentFacts(
        number=one.number,
        cause=str(event.get("cause") or "unknown"),
        subject=str(event.get("subject") or ""),
        what=what,
        doing=str(event.get("doing") or ""),
        step=_shown_at(event, lines.lines, before),
        onset_step=as_integer(event.get("onset_step")),
        began_at=onset,
        reported_at=reported_at,
        ended_at=ended_at,
        is_mended=is_mended,
        later_attempt=lines.attempt_beyond(event) if is_mended is False else None,
        end_reason="" if end is None else str(end.get("reason") or ""),
        detected_s=reported_at - onset,
        repaired_s=_seconds(onset, ended_at) if is_mended else None,
        next_step_s=_seconds(onset, lines.times[later]) if later < len(lines.times) else None,
        steps_back=steps_back,
        lines_before=before,
        batches_rejected=one.batches_rejected,
        actions=tuple(map(str, actions)) if isinstance(actions, list) else (),
        has_folder=one.number in folders,
    )


def _seconds(begin: float, end: float | None) -> float | None:
    """None where the clock was set back between the two: how long it took is not known then."""
    return None if end is None or end < begin else end - begin


def _onset(event: Record, death_s: float, steps: StepTimes, span: Span) -> float:
    """The earliest known: the observer's `at`, the death that its host saw, the last sign of life of what hangs, the
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
        for index in range(steps.before(reported_at, span) - 1, -1, -1):
            if steps.lines[index].step == onset_step:
                candidates.append(steps.times[index])
                break
            if steps.lines[index].step < onset_step:
                break
    return min(candidates)


def _shown_at(event: Record, lines: Sequence[StepLine], before: int) -> int:
    """On the curve: the step that was under way when it was reported, or at which it began."""
    onset = as_integer(event.get("onset_step"))
    if onset is not None:
        return max(onset, 0)
    return lines[before - 1].step + 1 if before else 0
