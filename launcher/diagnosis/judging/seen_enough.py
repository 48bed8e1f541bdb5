"""Whether enough was seen to call a run fine, and where it made no step for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.diagnosis.reading.log_records import REWARD, Contents, Kind

LEAST_REWARDS = 15
STALL_STEPS, STALL_MIN_S = 10.0, 60.0
"""A run is stalled after this many usual step times without a step, and this many seconds at least."""
STARTED_AGAIN = (Kind.RECOVER_RUN, Kind.RESUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No step for `seconds` after `after_step`, where one usually takes `usual_s`. `is_over`: another step followed."""

    after_step: int
    seconds: float
    usual_s: float
    is_over: bool


def longest_stall(contents: Contents) -> Stall | None:
    """The longest of more than ten usual steps that no restart explains; None where there is none."""
    steps, is_dated = contents.steps.steps, np.isfinite(contents.steps.times)
    times, numbers = contents.steps.times[is_dated], steps[is_dated]
    if len(times) < LEAST_REWARDS:
        return None
    usual = float(np.median(np.diff(times)))
    has_end = any(event.kind is Kind.RUN_ENDED for event in contents.log_events)
    is_done = has_end or numbers[-1] == contents.total_steps - 1
    ends = [source.last_time for source in contents.sources if source.last_time is not None]
    bounds = np.append(times, times[-1] if is_done else max([float(times[-1]), *ends]))
    found = None
    for row in np.argsort(np.diff(bounds))[::-1]:
        seconds = float(bounds[row + 1] - bounds[row])
        if seconds <= max(STALL_STEPS * usual, STALL_MIN_S):
            break
        if not _started_again(contents, float(bounds[row]), float(bounds[row + 1])):
            is_over = bool(row + 1 < len(times))
            found = Stall(after_step=int(numbers[row]), seconds=seconds, usual_s=usual, is_over=is_over)
            break
    return found


def _started_again(contents: Contents, begin: float, end: float) -> bool:
    restarts = (event.time for event in contents.log_events if event.kind in STARTED_AGAIN)
    return any(time is not None and begin <= time <= end for time in restarts)


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
    if last is not None and contents.total_steps and last + 1 < contents.total_steps:
        yield f"the log ends at step {last + 1} of {contents.total_steps}, and nothing in it says why"
