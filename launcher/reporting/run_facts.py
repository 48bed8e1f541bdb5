"""The facts of a run, from its data: which steps are current, what happened, what was lost. Pure: RunData in,
RunFacts out.

Measures are those of the field, as far as a run can know them of itself:

    detected   from when the trouble began, by the run's own best knowledge, to the moment the journal recorded it
    repaired   from when it began until the subject worked again
    next step  from when it began to the next committed step
    ETTR       time of the current steps (those not undone) / wall time of all attempts
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean

import numpy as np

from launcher.base.errors import JournalError
from launcher.base.messages import EvalReport
from launcher.base.prompt_order import PromptOrder
from launcher.reporting.event_lines import what_happened
from launcher.reporting.figures import Figures
from launcher.reporting.incident_facts import IncidentFacts, incidents_of
from launcher.reporting.ledger_audit import NO_CHECKPOINT, NONE_OF_ITS_OWN, NOT_READ, Audit
from launcher.reporting.line_values import as_float, as_integer, as_unix_time
from launcher.reporting.lost_time import Losses, losses_of
from launcher.reporting.queue_state import read_queue_state
from launcher.reporting.run_audit import QueueReader, audit_of, bounds_of_staleness, total_steps
from launcher.reporting.run_clock import AttemptSpan, RunClock, attempts_of
from launcher.reporting.run_reader import (
    MemoryReading,
    RunData,
    RunReader,
    StepLine,
    incident_folders,
)
from launcher.reporting.run_view import MEAN_OVER_STEPS
from launcher.run_files.journal import Record
from launcher.run_files.run_ends import ENDS, STARTED
from launcher.run_files.run_order import place_restores
from launcher.run_files.run_paths import RunPaths

GLOBAL_STEP = re.compile(r"globalstep(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The trainer went back to `step`, when `after` lines of steps were written; `steps_back` committed steps were
    undone by that."""

    after: int
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
    """`steps` are the current ones, in order. `taken_back` were undone: one tuple for each time that steps were.

    `figures` grow on with their file. `not_read`: lines that say nothing. `word` is the run's final status, "" while it
    has none. `audit` is None where there is nothing to audit against.
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
    figures: Figures
    not_read: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.experiment_name} / {self.trial_name}"

    @property
    def reward_first(self) -> float | None:
        """Mean over the first steps that had a reward; None before there is one."""
        return fmean(rewards[:MEAN_OVER_STEPS]) if (rewards := self._rewards()) else None

    @property
    def reward_last(self) -> float | None:
        """Mean over the last steps that had a reward; None before there is one."""
        return fmean(rewards[-MEAN_OVER_STEPS:]) if (rewards := self._rewards()) else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the time spent in rollouts."""
        seconds = sum(finite(line.seconds.get("rollout", math.nan) for line in self.steps))
        return sum(finite(line.tokens for line in self.steps)) / seconds if seconds > 0 else None

    def kept_lines(self) -> np.ndarray:
        """Which lines of `figures` are of steps that no restore undid."""
        return self.figures.kept((one.after, one.step) for one in self.restores)

    def _rewards(self) -> list[float]:
        return finite(line.reward for line in self.steps)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def read_facts(paths: RunPaths, *, order: PromptOrder | str = NOT_READ, is_live: bool | None = None) -> RunFacts:
    """All that a run has written. `order`, `is_live`: as for `facts_of_run`. Raises JournalError naming a file that
    can't be read."""
    reader = RunReader(paths)
    reader.refresh(has_ended=True)
    check_readable(paths)
    return facts_of_run(reader.data, paths, order=order, is_live=is_live)


def check_readable(paths: RunPaths) -> None:
    """Raises JournalError naming a file that is there and can't be read."""
    for path in (paths.events, paths.ledger, paths.metrics):
        try:
            path.open("rb").close()
        except FileNotFoundError:  # its first writer has not come
            continue
        except OSError as error:
            raise JournalError(f"{path} can't be read: {error.strerror}", "check its permissions") from error


def facts_of_run(
    data: RunData, paths: RunPaths, *, order: PromptOrder | str = NOT_READ, is_live: bool | None = None
) -> RunFacts:
    """With what the run holds beside the files that grow: settings, folders of incidents, the newest checkpoint.
    `is_live`: whether its driver is there; None: it is not known."""
    staleness, staleness_of = bounds_of_staleness(paths)
    return facts_of(
        data,
        experiment_name=paths.experiment_name,
        trial_name=paths.trial_name,
        staleness=staleness,
        staleness_of=staleness_of,
        folders=incident_folders(paths),
        read_queue=partial(read_queue_state, paths),
        order=order,
        is_live=is_live,
    )


def facts_of(
    data: RunData,
    *,
    experiment_name: str,
    trial_name: str,
    staleness: int | None = 0,
    staleness_of: Mapping[int, int | None] = NONE_OF_ITS_OWN,
    folders: frozenset[int] = frozenset(),
    read_queue: QueueReader = lambda until: NO_CHECKPOINT,
    order: PromptOrder | str = NOT_READ,
    is_live: bool | None = None,
) -> RunFacts:
    """`staleness`, `staleness_of`: rollout.max_head_offpolicyness, as for `audit`. `folders`: incidents of which
    evidence was kept. `order`: of the data set's prompts, or why it is not known. `is_live`: as for `facts_of_run`."""
    attempts = attempts_of(data)
    word, reason = _last_word(data.events, attempts)
    restores = _restores(data)
    steps, taken_back = _standing(data.steps, restores)
    until = max((attempt.end for attempt in attempts), default=0.0)
    backs = {one.incident: one.steps_back for one in restores if one.incident is not None}
    incidents = incidents_of(data, steps_back=backs, folders=folders, say=what_happened)
    return RunFacts(
        figures=data.figures,
        not_read=data.not_read,
        experiment_name=experiment_name,
        trial_name=trial_name,
        word=word,
        reason=reason,
        clock=RunClock(attempts),
        attempts=attempts,
        steps=steps,
        taken_back=taken_back,
        total_steps=total_steps(data.events, word),
        evals=_evals(data.events),
        incidents=incidents,
        restores=restores,
        checkpoints=_checkpoints(data.events),
        states=_states(data.events),
        memory=tuple(reading for reading in data.memory if reading.time),
        rejected=sum(event.get("event") == "batch.rejected" for event in data.events),
        rollouts_failed=data.rollouts_failed,
        rollouts_retried=data.rollouts_retried,
        audit=audit_of(
            data,
            word=word,
            staleness=staleness,
            staleness_of=staleness_of,
            read_queue=read_queue,
            order=order,
            is_live=is_live,
        ),
        losses=losses_of(steps, incidents, attempts, until),
    )


def _last_word(events: Sequence[Record], attempts: Sequence[AttemptSpan]) -> tuple[str, str]:
    """Of the last attempt; ("", "") while it has none."""
    for event in reversed(events):
        status = ENDS.get(str(event.get("event")))
        if status is not None and attempts and as_integer(event.get("attempt")) == attempts[-1].number:
            return str(status), str(event.get("reason") or "")
    return "", ""


def _restores(data: RunData) -> tuple[Restore, ...]:
    """Each restore after at least one step; a run's first check for something to restore is none."""
    found: list[Restore] = []
    at, head = 0, -1
    for placed in place_restores(data.events, data.steps, attrgetter("head")):
        event, step = placed.event, as_integer(placed.event.get("global_step"))
        if step is None or not placed.after:
            continue
        head = data.steps[placed.after - 1].step if placed.after > at else head
        back, at, head = max(head - step, 0), placed.after, min(head, step)
        found.append(
            Restore(
                after=placed.after,
                time=as_unix_time(event.get("time")),
                step=step,
                steps_back=back,
                reason=str(event.get("reason") or ""),
                incident=as_integer(event.get("incident")),
            )
        )
    return tuple(found)


def _standing(
    lines: Sequence[StepLine], restores: Sequence[Restore]
) -> tuple[tuple[StepLine, ...], tuple[tuple[StepLine, ...], ...]]:
    """A restore undoes the steps after its own, also where the run has not stepped since."""
    standing: list[StepLine] = []
    taken_back: list[tuple[StepLine, ...]] = []

    def back_to(step: int) -> None:
        gone = []
        while standing and standing[-1].step > step:
            gone.append(standing.pop())
        if gone:
            taken_back.append(tuple(reversed(gone)))

    waiting = deque(restores)
    for number, line in enumerate(lines):
        while waiting and waiting[0].after <= number:
            back_to(waiting.popleft().step)
        back_to(line.step - 1)
        standing.append(line)
    for restore in waiting:
        back_to(restore.step)
    return tuple(standing), tuple(taken_back)


def _evals(events: Sequence[Record]) -> tuple[EvalReport, ...]:
    reports = {}
    for event in events:
        version, prompts = as_integer(event.get("policy_version")), as_integer(event.get("prompts"))
        if event.get("event") == "eval.done" and version is not None and prompts is not None:
            sampled, greedy = as_float(event.get("sampled")), as_float(event.get("greedy"))
            if math.isfinite(sampled) and math.isfinite(greedy):
                given = event.get("by_dataset")
                pairs = given.items() if isinstance(given, Mapping) else ()
                by_dataset = {name: [*map(as_float, pair)] for name, pair in pairs if len(pair) == 2}
                reports[version] = EvalReport(
                    policy_version=version, prompts=prompts, sampled=sampled, greedy=greedy, by_dataset=by_dataset
                )
    return tuple(reports[version] for version in sorted(reports))


FATES = {
    "checkpoint.pruned": "made room",
    "checkpoint.set_aside": "set aside by a restore",
    "checkpoint.condemned": "condemned",
    "checkpoint.damaged": "damaged",
}


def _checkpoints(events: Sequence[Record]) -> tuple[CheckpointSummary, ...]:
    """Each commit; of a step that was saved twice, an event about it is counted for the last one before the event."""
    found: list[CheckpointSummary] = []
    for event in events:
        name, step = str(event.get("event")), as_integer(event.get("global_step"))
        if name == "checkpoint.committed" and step is not None:
            seconds = as_float(event.get("seconds"))
            found.append(CheckpointSummary(step=step, time=as_unix_time(event.get("time")), seconds=seconds))
        elif name in FATES:
            for gone in _steps_named(event):
                _mark(found, gone, FATES[name])
    return tuple(found)


def _steps_named(event: Record) -> set[int]:
    names = event.get("checkpoints")
    said = [*(names if isinstance(names, list) else ()), event.get("subject")]
    steps = {int(match[1]) for text in said if (match := GLOBAL_STEP.search(str(text)))}
    step = as_integer(event.get("global_step"))
    return steps or ({step} if step is not None and event.get("event") != "checkpoint.condemned" else set())


def _mark(found: list[CheckpointSummary], step: int, fate: str) -> None:
    for index in range(len(found) - 1, -1, -1):
        one = found[index]
        if one.step == step and not one.fate:
            found[index] = CheckpointSummary(step=step, time=one.time, seconds=one.seconds, fate=fate)
            return


def _states(events: Sequence[Record]) -> tuple[tuple[float, str, str], ...]:
    """When the run entered which state, and why. An attempt begins in INITIALIZING, and ends with its final status."""
    found = []
    for event in events:
        name = str(event.get("event"))
        state = str(event.get("state") or "")
        if name == STARTED:
            state = "INITIALIZING"
        elif name in ENDS:
            state = str(ENDS[name])
        if name.startswith("run.") and state:
            found.append((as_unix_time(event.get("time")), state, str(event.get("reason") or "")))
    return tuple(found)
