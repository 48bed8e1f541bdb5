"""What a run's story amounts to: what stands, what happened, what was lost. Pure: a Story in, RunFacts out.

Measures are those of the field, as far as a run can know them of itself:

    detected   from when the trouble began, by the run's own best knowledge, to the moment the journal said so
    repaired   from when it began until the subject worked again
    next step  from when it began to the next committed step
    ETTR       time of the steps that stand / wall time of all attempts
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.messages import EvalReport
from launcher.html_report.incident_facts import IncidentFacts, incidents_of
from launcher.html_report.lost_time import Losses, losses_of
from launcher.html_report.run_clock import AttemptSpan, RunClock, attempts_of
from launcher.html_report.run_reader import Line, MemoryReading, RunData, StepLine, figure, moment, whole
from launcher.reporting.event_lines import what_happened
from launcher.reporting.ledger_audit import Audit, audit

GLOBAL_STEP = re.compile(r"globalstep(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The trainer went back to `step`; `steps_back` committed steps stand no more for it."""

    time: float
    step: int
    steps_back: int
    reason: str
    incident: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """`fate` is "" while it lies where it was committed."""

    step: int
    time: float
    seconds: float
    fate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """`steps` stand, in order. `taken_back` don't: one tuple for each time that steps were taken back.

    `word` is "" while the run has not said its last one. `audit` is None where there is nothing to audit against.
    """

    experiment_name: str
    trial_name: str
    word: str
    reason: str
    clock: RunClock
    attempts: tuple[AttemptSpan, ...]
    steps: tuple[StepLine, ...]
    taken_back: tuple[tuple[StepLine, ...], ...]
    total_steps: int | None
    evals: tuple[EvalReport, ...]
    incidents: tuple[IncidentFacts, ...]
    restores: tuple[Restore, ...]
    checkpoints: tuple[CheckpointSummary, ...]
    states: tuple[tuple[float, str, str], ...]
    memory: tuple[MemoryReading, ...]
    rejected: int
    rollouts_failed: int
    rollouts_retried: int
    audit: Audit | None
    losses: Losses


def facts_of(
    story: RunData, *, experiment_name: str, trial_name: str, staleness: int = 0, folders: frozenset[int] = frozenset()
) -> RunFacts:
    """`staleness`: rollout.max_head_offpolicyness. `folders`: incidents of which evidence was kept."""
    attempts = attempts_of(story)
    word, reason = _last_word(story.events, attempts)
    restores = _restores(story)
    steps, taken_back = _standing(story.steps, restores)
    until = max((attempt.end for attempt in attempts), default=0.0)
    backs = {one.incident: one.steps_back for one in restores if one.incident is not None}
    incidents = incidents_of(story, steps_back=backs, folders=folders, say=what_happened)
    return RunFacts(
        experiment_name=experiment_name,
        trial_name=trial_name,
        word=word,
        reason=reason,
        clock=RunClock(attempts),
        attempts=attempts,
        steps=steps,
        taken_back=taken_back,
        total_steps=_last_fact(story.events, "trainer.started", "total_steps"),
        evals=_evals(story.events),
        incidents=incidents,
        restores=restores,
        checkpoints=_checkpoints(story.events),
        states=_states(story.events),
        memory=tuple(reading for reading in story.memory if reading.time),
        rejected=sum(event.get("event") == "batch.rejected" for event in story.events),
        rollouts_failed=story.rollouts_failed,
        rollouts_retried=story.rollouts_retried,
        audit=_audit(story, staleness, has_ended=bool(word)),
        losses=losses_of(steps, story.steps, incidents, attempts, until),
    )


def _last_word(events: Sequence[Line], attempts: Sequence[AttemptSpan]) -> tuple[str, str]:
    """Of the last attempt; ("", "") while it has none."""
    for event in reversed(events):
        name = str(event.get("event"))
        if name in ("run.finished", "run.errored", "run.aborted") and attempts and _is_of(event, attempts[-1]):
            return name.removeprefix("run.").upper(), str(event.get("reason") or "")
    return "", ""


def _is_of(event: Line, attempt: AttemptSpan) -> bool:
    return whole(event.get("attempt")) == attempt.number


def _restores(story: RunData) -> tuple[Restore, ...]:
    """Each that found steps to stand behind; a run's first look for something to restore is none."""
    found: list[Restore] = []
    at, head = 0, -1
    for event in story.events:
        step, time = whole(event.get("global_step")), moment(event.get("time"))
        if event.get("event") != "trainer.restored" or step is None:
            continue
        while at < len(story.steps) and story.steps[at].time <= time:
            head = story.steps[at].step
            at += 1
        if at:
            back, head = max(head - step, 0), min(head, step)
            reason, incident = str(event.get("reason") or ""), whole(event.get("incident"))
            found.append(Restore(time=time, step=step, steps_back=back, reason=reason, incident=incident))
    return tuple(found)


def _standing(
    lines: Sequence[StepLine], restores: Sequence[Restore]
) -> tuple[tuple[StepLine, ...], tuple[tuple[StepLine, ...], ...]]:
    """A restore takes back what came after its step, also where the run has not stepped since."""
    standing: list[StepLine] = []
    taken_back: list[tuple[StepLine, ...]] = []

    def back_to(step: int) -> None:
        gone = []
        while standing and standing[-1].step > step:
            gone.append(standing.pop())
        if gone:
            taken_back.append(tuple(reversed(gone)))

    for line in lines:
        back_to(line.step - 1)
        standing.append(line)
    if restores and (not lines or restores[-1].time > lines[-1].time):
        back_to(restores[-1].step)
    return tuple(standing), tuple(taken_back)


def _evals(events: Sequence[Line]) -> tuple[EvalReport, ...]:
    reports = {}
    for event in events:
        version, prompts = whole(event.get("policy_version")), whole(event.get("prompts"))
        if event.get("event") == "eval.done" and version is not None and prompts is not None:
            sampled, greedy = figure(event.get("sampled")), figure(event.get("greedy"))
            reports[version] = EvalReport(policy_version=version, prompts=prompts, sampled=sampled, greedy=greedy)
    return tuple(reports[version] for version in sorted(reports))


FATES = {
    "checkpoint.pruned": "made room",
    "checkpoint.set_aside": "set aside by a restore",
    "checkpoint.condemned": "condemned",
    "checkpoint.damaged": "damaged",
}


def _checkpoints(events: Sequence[Line]) -> tuple[CheckpointSummary, ...]:
    """Each commit; of a step that was saved twice, what became of one is told of the last before it."""
    found: list[CheckpointSummary] = []
    for event in events:
        name, step = str(event.get("event")), whole(event.get("global_step"))
        if name == "checkpoint.committed" and step is not None:
            seconds = figure(event.get("seconds"))
            found.append(CheckpointSummary(step=step, time=moment(event.get("time")), seconds=seconds))
        elif name in FATES:
            for gone in _steps_named(event):
                _mark(found, gone, FATES[name])
    return tuple(found)


def _steps_named(event: Line) -> set[int]:
    names = event.get("checkpoints")
    said = [*(names if isinstance(names, list) else ()), event.get("subject")]
    steps = {int(match[1]) for text in said if (match := GLOBAL_STEP.search(str(text)))}
    step = whole(event.get("global_step"))
    return steps or ({step} if step is not None and event.get("event") != "checkpoint.condemned" else set())


def _mark(found: list[CheckpointSummary], step: int, fate: str) -> None:
    for index in range(len(found) - 1, -1, -1):
        one = found[index]
        if one.step == step and not one.fate:
            found[index] = CheckpointSummary(step=step, time=one.time, seconds=one.seconds, fate=fate)
            return


def _states(events: Sequence[Line]) -> tuple[tuple[float, str, str], ...]:
    """When the run entered which state, and why. An attempt begins in INITIALIZING, and ends in its word."""
    found = []
    for event in events:
        name = str(event.get("event"))
        state = str(event.get("state") or "")
        if name == "run.started":
            state = "INITIALIZING"
        elif name in ("run.finished", "run.errored", "run.aborted"):
            state = name.removeprefix("run.").upper()
        if name.startswith("run.") and state:
            found.append((moment(event.get("time")), state, str(event.get("reason") or "")))
    return tuple(found)


def _audit(story: RunData, staleness: int, *, has_ended: bool) -> Audit | None:
    """Of a run that goes on, the step that is being written down at this moment is left out."""
    prompts = _last_fact(story.events, "trainer.started", "prompts")
    if not prompts or not story.ledger:
        return None
    ledger = story.ledger
    if not has_ended:
        known = {line.step for line in story.steps}
        ledger = [line for line in ledger if line["global_step"] in known or line is not ledger[-1]]
    metrics = [{"global_step": line.step, "grpo_actor/logprob_distance/avg": line.distance} for line in story.steps]
    return audit(ledger, metrics, prompts=prompts, staleness=staleness)


def _last_fact(events: Sequence[Line], name: str, key: str) -> int | None:
    return next((whole(e.get(key)) for e in reversed(events) if e.get("event") == name), None)
