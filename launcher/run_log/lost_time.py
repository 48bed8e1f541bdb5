"""How much of a run's time became training that was kept: ETTR, plain, strict and semantic.

plain     seconds of the current steps (those not undone) / seconds of all attempts
strict    the same, where a step during an incident counts as no longer than the usual one: waiting is a loss too
semantic  plain, with the steps counted as lost that were trained on what turned out to be bad, and were not undone

Beside these shares, the seconds that faults took: not start-up and evaluation, nor what a person undid.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.run_log.incident_facts import IncidentFacts
from launcher.run_log.run_clock import AttemptSpan
from launcher.run_log.run_log import Restore
from launcher.run_log.step_line import StepLine

Span = tuple[float, float]
"""Its begin and its end, in unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Shares from 0 to 1, None where there is no time to share. `bad_steps`: None where it can't be known.

    `lost_steps_per_incident` is L = k (1 / ETTR − 1): usual steps of the strict loss for each incident. `faults_s`:
    steps that a restore during an incident undid, what a step during an incident took beyond the usual one, and the
    rest of the time of incidents, in which no step was under way. `startup_s`: from the begin of each attempt to that
    of its first step. `undone_s`: of steps that were undone, by whomever.
    """

    wall_s: float
    standing_s: float
    startup_s: float
    undone_s: float
    usual_step_s: float | None
    ettr: float | None
    strict: float | None
    semantic: float | None
    bad_steps: int | None
    lost_steps_per_incident: float | None
    faults_s: float


def losses_of(
    steps: Sequence[StepLine],
    undone: Sequence[StepLine],
    restores: Sequence[Restore],
    incidents: Sequence[IncidentFacts],
    attempts: Sequence[AttemptSpan],
) -> Losses:
    """`steps` are the current ones, in order; `undone` all others."""
    wall_s = sum(attempt.seconds for attempt in attempts)
    timed, undone = _timed(steps), _timed(undone)
    usual = median(line.step_s for line in timed) if timed else None
    standing_s = sum(line.step_s for line in timed)
    timed_incidents = [one for one in incidents if one.reported_at > 0]
    spans = _merged([(one.began_at, one.ended_at or _end_of_its_attempt(one, attempts)) for one in timed_incidents])
    strict_s = sum(min(line.step_s, usual or 0.0) if _touches(line, spans) else line.step_s for line in timed)
    bad = _bad_steps(timed, incidents)
    semantic_s = None if bad is None else standing_s - sum(line.step_s for line in bad)
    strict = _share(strict_s, wall_s)
    lost_steps = max(wall_s - strict_s, 0.0) / usual / len(incidents) if incidents and usual and wall_s > 0 else None
    by_faults_s = sum(line.step_s for line in _undone_by_faults(undone, restores, spans))
    idle_s = _idle_s(_within(spans, attempts), [*timed, *undone])
    return Losses(
        wall_s=wall_s,
        standing_s=standing_s,
        startup_s=sum(_startup_s(one, [*timed, *undone]) for one in attempts),
        undone_s=sum(line.step_s for line in undone),
        usual_step_s=usual,
        ettr=_share(standing_s, wall_s),
        strict=strict,
        semantic=None if semantic_s is None else _share(semantic_s, wall_s),
        bad_steps=None if bad is None else len(bad),
        lost_steps_per_incident=lost_steps,
        faults_s=max(standing_s - strict_s + by_faults_s + idle_s, 0.0),  # a sum of differences: it may be -1e-13
    )


def _end_of_its_attempt(one: IncidentFacts, attempts: Sequence[AttemptSpan]) -> float:
    """Of one that is open: a driver that was killed leaves it so, whatever later attempts do."""
    return next((attempt.end for attempt in attempts if attempt.end >= one.reported_at), one.reported_at)


def _startup_s(attempt: AttemptSpan, steps: Sequence[StepLine]) -> float:
    """All of an attempt that came to no step."""
    begun = [line.time - line.step_s for line in steps if line.attempt == attempt.number]
    return min(max(min(begun, default=attempt.end) - attempt.start, 0.0), attempt.seconds)


def _timed(steps: Sequence[StepLine]) -> list[StepLine]:
    return [line for line in steps if math.isfinite(line.step_s) and line.step_s >= 0]


def _undone_by_faults(
    undone: Sequence[StepLine], restores: Sequence[Restore], spans: Sequence[Span]
) -> Iterator[StepLine]:
    """Those that a restore during an incident took back; any other is a person's, or follows an end without a cause."""
    afters = [one.after for one in restores]
    for line in undone:
        later = restores[bisect_right(afters, line.number) :]  # the first of them is nearly always the one
        back = next((one for one in later if one.step < line.step), None)
        if back is not None and any(begin <= back.time <= end for begin, end in spans):
            yield line


def _within(spans: Sequence[Span], attempts: Sequence[AttemptSpan]) -> list[Span]:
    """Without the time between attempts, in which nobody knows whether the machines are paid for."""
    cut = [(max(begin, one.start), min(end, one.end)) for begin, end in spans for one in attempts]
    return [(begin, end) for begin, end in cut if begin < end]


def _idle_s(spans: Sequence[Span], steps: Sequence[StepLine]) -> float:
    """Seconds of `spans` in which none of `steps` was under way."""
    made = [(line.time - line.step_s, line.time) for line in steps if _touches(line, spans)]
    return _length(_merged([*made, *spans])) - _length(_merged(made))


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _share(part: float, whole: float) -> float | None:
    return min(part / whole, 1.0) if whole > 0 else None


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _touches(line: StepLine, spans: Sequence[Span]) -> bool:
    """Was an incident open at any moment of this step?"""
    before = bisect_left(spans, (line.time,))
    return before > 0 and spans[before - 1][1] > line.time - line.step_s


def _bad_steps(steps: Sequence[StepLine], incidents: Sequence[IncidentFacts]) -> list[StepLine] | None:
    """Current steps, from the first bad one until the incident was reported. None: an incident's first isn't known."""
    bad: dict[int, StepLine] = {}
    for one in incidents:
        if one.cause not in ("reward_collapse", "verifier_broken"):
            continue  # a batch of wrong weights or numbers is turned away at the gate, before any step on it
        if one.is_mended and one.batches_rejected and not one.steps_back:
            continue  # its batch was turned away too, and the run found nothing to undo: those after it are sound
        if one.onset_step is None:
            return None
        first = one.onset_step
        bad |= {line.step: line for line in steps if line.step >= first and line.number < one.lines_before}
    return list(bad.values())
