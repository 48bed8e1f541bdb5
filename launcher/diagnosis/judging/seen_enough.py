"""Whether enough was seen to call a run fine, where it made no step for long, and what it lost by that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launcher.base.wording import some_of
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.diagnosis.reading.log_clock import say_duration
from launcher.diagnosis.reading.log_records import FAILED, REWARD, Contents, Floats, Kind, LogEvent, Role

LEAST_REWARDS = 15
STALL_STEPS, STALL_MIN_S = 10.0, 60.0
"""A run is stalled after this many usual step times without a step, and this many seconds at least."""
ENDINGS = (Kind.OUT_OF_MEMORY, Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION, Kind.SERVER_WATCHDOG, Kind.TRAINER_FAILED)
STARTED_AGAIN = (Kind.RECOVER_RUN, Kind.RESUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No step for `seconds` after `after_step`, where one usually takes `usual_s`. `is_over`: another step followed.

    `said`: the first incident that the run itself recorded meanwhile; "" where it recorded none.
    """

    after_step: int
    seconds: float
    usual_s: float
    is_over: bool
    said: str


def longest_stall(contents: Contents) -> Stall | None:
    """The longest of more than ten usual steps that no restart and no pause that was asked for explains; or None."""
    steps, is_dated = contents.steps.steps, np.isfinite(contents.steps.times)
    times, numbers = contents.steps.times[is_dated], steps[is_dated]
    if len(times) < LEAST_REWARDS:
        return None
    usual = float(np.median(np.diff(times)))
    has_end = any(event.kind is Kind.RUN_ENDED for event in contents.log_events)
    is_done = has_end or numbers[-1] == contents.total_steps - 1
    ends = [s.last_time for s in contents.sources if s.last_time is not None and s.role is not Role.KERNEL]
    bounds = np.append(times, times[-1] if is_done else max([float(times[-1]), *ends]))
    lengths = np.diff(bounds - _held_s(contents, bounds))
    found = None
    for row in np.argsort(lengths)[::-1]:
        seconds = float(lengths[row])
        if seconds <= max(STALL_STEPS * usual, STALL_MIN_S):
            break
        if not _started_again(contents, float(bounds[row]), float(bounds[row + 1])):
            is_over = bool(row + 1 < len(times))
            said = _first_incident(contents, float(bounds[row]), float(bounds[row + 1]) if is_over else np.inf)
            found = Stall(after_step=int(numbers[row]), seconds=seconds, usual_s=usual, is_over=is_over, said=said)
            break
    return found


def _first_incident(contents: Contents, begin: float, end: float) -> str:
    incidents = (event for event in contents.log_events if event.kind is Kind.INCIDENT)
    return next((event.text for event in incidents if event.time is not None and begin <= event.time <= end), "")


def _started_again(contents: Contents, begin: float, end: float) -> bool:
    restarts = (event.time for event in contents.log_events if event.kind in STARTED_AGAIN)
    return any(time is not None and begin <= time <= end for time in restarts)


def _held_s(contents: Contents, times: Floats) -> Floats:
    """For how long, until each of these times, the run was paused because somebody asked for that."""
    held = np.zeros_like(times)
    ends = [e.time for e in contents.log_events if e.kind in (Kind.RELEASED, *STARTED_AGAIN, Kind.RUN_ENDED) and e.time]
    until = -np.inf
    for event in contents.log_events:
        if event.kind is Kind.HELD and event.time is not None and event.time >= until:
            until = min((end for end in ends if end > event.time), default=np.inf)
            held += np.clip(times - event.time, 0.0, until - event.time)
    return held


def losses_of(contents: Contents) -> Iterator[str]:
    """What the run lost, each thing counted once: time without a step, steps done twice, requests and groups."""
    steps, times = contents.steps.steps, contents.steps.times[np.isfinite(contents.steps.times)]
    gaps = np.diff(times - _held_s(contents, times))
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    is_long = gaps > max(STALL_STEPS * usual, STALL_MIN_S)
    if is_long.any():
        lost = float((gaps[is_long] - usual).sum())
        yield f"{say_duration(lost)} without a step (pauses between steps: {is_long.sum()})"
    if twice := len(steps) - len(set(steps.tolist())):
        yield f"steps done twice: {twice}"
    failed = [event.facts for event in contents.log_events if event.kind in FAILED]
    for fact, words in (("requests", "requests given up"), ("groups", "groups dropped")):
        if count := sum(number for facts in failed if isinstance(number := facts.get(fact), int)):
            yield f"{words}: {count:,}"


def not_seen(contents: Contents, health: HealthEvidence) -> Iterator[str]:
    """What keeps a run without a failure from being called fine, the weightiest first."""
    rewards, last = contents.steps.column(REWARD), contents.steps.last_step
    known = int(np.isfinite(rewards).sum())
    if last is None:
        yield "no step was understood in these files"
    elif not known:
        yield f"none of the {len(rewards)} steps has a reward"
    elif known < LEAST_REWARDS:
        zeros = f", reward 0 since the first of them, step {contents.steps.steps[0]}" if not rewards.any() else ""
        yield f"only {known} step{'' if known == 1 else 's'} with a reward: too few to see a fall{zeros}"
    elif health.not_known:
        yield health.not_known
    if last is not None and (unplaced := [one for one in contents.log_events if _may_have_ended_it(one)]):
        where = some_of([f"{one.kind} ({one.where})" for one in unplaced], most=3)
        yield f"nothing shows when this was among the steps: {where}"
    if last is not None and contents.total_steps and last + 1 < contents.total_steps:
        yield f"the log ends at step {last + 1} of {contents.total_steps}, and nothing in it says why"


def _may_have_ended_it(event: LogEvent) -> bool:
    return event.kind in ENDINGS and event.time is None and event.after_step is None
