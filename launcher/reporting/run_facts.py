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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean

import numpy as np

from launcher.base.messages import EvalReport
from launcher.base.prompt_order import PromptOrder
from launcher.reporting.event_lines import what_happened
from launcher.reporting.figures import Figures
from launcher.reporting.ledger_audit import NO_CHECKPOINT, NONE_OF_ITS_OWN, NOT_READ, Audit
from launcher.reporting.queue_state import read_queue_state
from launcher.reporting.run_audit import QueueReader, audit_of, bounds_of_staleness
from launcher.reporting.run_reader import MemoryReading, RunData, RunReader, incident_folders
from launcher.reporting.run_view import MEAN_OVER_STEPS
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of, settings_of_attempts
from launcher.run_log.file_follower import check_readable
from launcher.run_log.incident_facts import IncidentFacts
from launcher.run_log.line_values import as_float
from launcher.run_log.lost_time import Losses, losses_of
from launcher.run_log.run_clock import AttemptSpan, RunClock
from launcher.run_log.run_log import CheckpointSummary, Restore, StateChange
from launcher.run_log.step_line import StepLine, SteppedBack

NO_SETTINGS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """`steps` are the current ones, in order. `taken_back` were undone: one tuple for each time that steps were.

    `figures` grow on with their file. `not_read`: lines that say nothing. `word` is the run's final status, "" while it
    has none. `audit` is None where there is nothing to audit against. `settings`: of the last attempt.
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
    stepped_back: tuple[SteppedBack, ...]
    checkpoints: tuple[CheckpointSummary, ...]
    states: tuple[StateChange, ...]
    servers: Mapping[str, Sequence[StateChange]]
    memory: tuple[MemoryReading, ...]
    rejected: int
    rollouts_failed: int
    rollouts_retried: int
    audit: Audit | None
    losses: Losses
    settings: Mapping[str, object]
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

    @property
    def price_per_hour(self) -> float | None:
        price = as_float(setting_of(self.settings, "run.price_per_hour"))
        return price if math.isfinite(price) else None

    @property
    def cost(self) -> tuple[float, float] | None:
        """Of faults and of all attempts, in the unit of run.price_per_hour; None where that is not given."""
        if self.price_per_hour is None:
            return None
        return self.losses.faults_s / 3600 * self.price_per_hour, self.losses.wall_s / 3600 * self.price_per_hour

    def kept_lines(self) -> np.ndarray:
        """Which lines of `figures` are of steps that no restore undid."""
        return self.figures.kept((one.after, one.step) for one in self.stepped_back)

    def _rewards(self) -> list[float]:
        return finite(line.reward for line in self.steps)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def read_facts(paths: RunPaths, *, order: PromptOrder | str = NOT_READ, is_live: bool | None = None) -> RunFacts:
    """All that a run has written. `order`, `is_live`: as for `facts_of_run`. Raises JournalError naming a file that
    can't be read."""
    reader = RunReader(paths)
    reader.refresh(has_ended=True)
    check_readable(paths.events, paths.ledger, paths.metrics)
    return facts_of_run(reader.data, paths, order=order, is_live=is_live)


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
        settings=_last_settings(paths, data.log.attempts()),
        folders=incident_folders(paths),
        read_queue=partial(read_queue_state, paths),
        order=order,
        is_live=is_live,
    )


def _last_settings(paths: RunPaths, attempts: Sequence[AttemptSpan]) -> Mapping[str, object]:
    """Of the last attempt; those are in config.yaml where no other file is of it."""
    last = attempts[-1].number if attempts else 0
    return read_settings(settings_of_attempts(paths.config).get(last, paths.config))


def facts_of(
    data: RunData,
    *,
    experiment_name: str,
    trial_name: str,
    staleness: int | None = 0,
    staleness_of: Mapping[int, int | None] = NONE_OF_ITS_OWN,
    settings: Mapping[str, object] = NO_SETTINGS,
    folders: frozenset[int] = frozenset(),
    read_queue: QueueReader = lambda until: NO_CHECKPOINT,
    order: PromptOrder | str = NOT_READ,
    is_live: bool | None = None,
) -> RunFacts:
    """`staleness`, `staleness_of`: rollout.max_head_offpolicyness, as for `audit`. `folders`: incidents of which
    evidence was kept. `order`: of the data set's prompts, or why it is not known. `is_live`: as for `facts_of_run`."""
    log = data.log
    attempts = log.attempts()
    word, reason = log.last_word()
    restores = log.restores()
    steps, taken_back = log.standing()
    incidents = log.incident_facts(restores, folders=folders, say=what_happened)
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
        total_steps=log.total_steps(),
        evals=log.evals(),
        incidents=incidents,
        restores=restores,
        stepped_back=tuple(log.stepped_back()),
        checkpoints=tuple(log.checkpoints),
        states=tuple(log.states),
        servers={name: tuple(changes) for name, changes in log.server_changes.items()},
        memory=tuple(reading for reading in data.memory if reading.time),
        rejected=log.batches_rejected,
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
        losses=losses_of(steps, [*chain(*taken_back)], restores, incidents, attempts),
        settings=settings,
    )
