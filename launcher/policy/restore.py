"""Chooses the checkpoint to restore: good, not latest (P4).

A checkpoint of step g holds the weights after step g. Its weights are first seen at work in the rollouts of step
g + 1, so a step whose *rewards* show damage accuses the checkpoint before it, while a step that was trained on false
rewards only accuses its own. `first_damaged` knows the difference.

Where the onset is an estimate, a certificate given before it was known is not believed without asking how old the
checkpoint is against it, less a margin; and of the old enough ones a certified one comes first. The onset of a sharp
fall is no estimate: the newest from before it is chosen, and if the fall comes back, a certified one. Where a run
that had learned has none older than the margin, or than what was restored before, the oldest from before the onset is
chosen: one more restore costs less than a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import CheckpointFacts, newest_first
from launcher.policy.restart_budget import RepairAttempt, Rung

SAME_PLACE_COLLAPSES = 3
"""Two restores, each further back, have not helped then: a fourth would fall in the same place for ever."""
FIRST_WEIGHTS = -1
"""The step of the weights that the run began with: always complete, and from before any onset but step 0."""

HINT = "; what the run had learned is not thrown away: choose with scripts.setup_recovery, or another trial_name"
FROM_THE_START = (
    "; the first weights show it too: the task, the chat template or the reward function may not suit the model "
    "(reward_health.zero_breaker_steps=null trains on without any reward)"
)
SEEN_IN_THE_NEXT_STEP = frozenset({Cause.REWARD_COLLAPSE, Cause.NONFINITE})
"""Causes that a step shows because the weights it began with are damaged."""

ONSET_IS_EXACT = frozenset({Cause.VERIFIER_BROKEN, Cause.NONFINITE})
"""Known answers are scored at each step: the first wrong one is the first wrong step. And a step whose numbers were
finite vouches for the weights it began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChoice:
    """The step to restore (FIRST_WEIGHTS: start from the beginning), or None where the run must halt."""

    global_step: int | None
    reason: str


def first_damaged(incident: Incident) -> int | None:
    """The first step whose checkpoint holds the damage; None where no weights were touched."""
    if incident.onset_step is None:
        return None
    return incident.onset_step - 1 if incident.cause in SEEN_IN_THE_NEXT_STEP else incident.onset_step


def choose(
    checkpoints: Sequence[CheckpointFacts],
    incident: Incident | None,
    history: Sequence[RepairAttempt],
    settings: RestoreConfig,
) -> RestoreChoice:
    """The checkpoint to restore. Without an incident (the trainer merely died) the newest that is not condemned.

    `history`: earlier attempts; restores from a collapse at the same place make the choice more careful, and the
    third (SAME_PLACE_COLLAPSES) ends it.
    """
    damaged = first_damaged(incident) if incident else None
    complete = [c for c in checkpoints if c.is_complete]
    if incident is None or damaged is None:
        newest = next(iter(newest_first(complete)), None)
        step = FIRST_WEIGHTS if newest is None else newest.global_step
        return RestoreChoice(global_step=step, reason=f"{_say(newest)} is the newest that is not condemned")
    restored_before = _restored_at_the_same_place(incident, history, settings)
    times = len(restored_before) + 1
    if times >= SAME_PLACE_COLLAPSES:
        reason = f"{incident.cause} at about step {incident.onset_step}, {times} times: restoring does not help"
        reason += FROM_THE_START if damaged <= FIRST_WEIGHTS else ""
        return RestoreChoice(global_step=None, reason=reason)
    is_suspected = bool(restored_before) and incident.cause in SEEN_IN_THE_NEXT_STEP
    if (incident.cause in ONSET_IS_EXACT or incident.is_sharp) and not is_suspected:
        return _newest(newest_first(complete, before_step=damaged), damaged, incident, settings)
    margin = damaged - settings.onset_margin_steps
    before = min([margin, *restored_before])  # what was restored before it collapsed again is suspected itself
    trusted = newest_first(complete, before_step=before, good=True) or newest_first(complete, before_step=before)
    halts = not trusted and (incident.had_learned or not settings.begin_anew)
    left = newest_first(complete, before_step=margin) or newest_first(complete, before_step=damaged)
    if halts and left:
        why = f"step {min(restored_before)} was restored before" if restored_before else "it is close to the onset"
        return RestoreChoice(global_step=left[-1].global_step, reason=f"{_say(left[-1])} is the oldest there is; {why}")
    return _newest(trusted, before, incident, settings)


def for_reports(settings: RestoreConfig, every: int) -> RestoreConfig:
    """What is counted in steps about an onset, for a trainer that reports one of `every` steps."""
    margin, place = settings.onset_margin_steps * every, settings.same_place_steps * every
    return replace(settings, onset_margin_steps=margin, same_place_steps=place)


def _restored_at_the_same_place(
    incident: Incident, history: Sequence[RepairAttempt], settings: RestoreConfig
) -> list[int]:
    """The steps to which earlier incidents of this cause, at this place, were restored."""
    return [
        attempt.restored_step
        for attempt in history
        if attempt.rung is Rung.RESTORE
        and attempt.cause is incident.cause
        and attempt.restored_step is not None
        and attempt.onset_step is not None
        and incident.onset_step is not None
        and abs(attempt.onset_step - incident.onset_step) <= settings.same_place_steps
    ]


def _newest(
    trusted: Sequence[CheckpointFacts], before_step: int, incident: Incident, settings: RestoreConfig
) -> RestoreChoice:
    until = before_step - 1
    if trusted:
        reason = f"{_say(trusted[0])} ({trusted[0].status}) is the newest that is trusted, up to step {until}"
        return RestoreChoice(global_step=trusted[0].global_step, reason=reason)
    reason = f"there is no checkpoint to trust up to step {until}"
    if incident.had_learned:
        return RestoreChoice(global_step=None, reason=f"{reason}{HINT}")
    if settings.begin_anew:
        return RestoreChoice(global_step=FIRST_WEIGHTS, reason=reason)
    return RestoreChoice(global_step=None, reason=f"{reason}, and restore.begin_anew is off")


def _say(checkpoint: CheckpointFacts | None) -> str:
    if checkpoint is None:
        return "the beginning"
    kind = "state in memory" if checkpoint.in_memory else "checkpoint"
    return f"the {kind} of step {checkpoint.global_step}"
