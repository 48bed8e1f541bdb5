"""What metrics.jsonl, ledger.jsonl and events.jsonl tell of a run, as far as its summary and its curve need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.base.messages import EvalReport
from launcher.reporting.run_view import REWARD
from launcher.run_files.journal import current_lines, number_of, read_lines
from launcher.run_files.run_paths import RunPaths

KEPT_METRICS = (REWARD, "rollout/tokens")
KEPT_PREFIX = "timeperf/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One line of metrics.jsonl: the step, and the metrics in KEPT_METRICS and below KEPT_PREFIX."""

    global_step: int
    attempt: int
    figures: Mapping[str, float]

    @property
    def reward(self) -> float:
        """NaN where the step had none."""
        return self.figures.get(REWARD, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of events.jsonl."""

    name: str
    global_step: int | None
    subject: str
    reason: str
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All attempts of a run. `steps` stand, in order; `taken_back` were committed too, and a restore undid them."""

    steps: tuple[StepFigures, ...]
    taken_back: tuple[StepFigures, ...]
    rollouts_failed: int
    rollouts_retried: int
    events: tuple[Event, ...]

    def events_named(self, *names: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.name in names)

    @property
    def evals(self) -> tuple[EvalReport, ...]:
        """Of each policy version the last evaluation, in the order of versions."""
        reports = {report.policy_version: report for report in map(_eval_of, self.events_named("eval.done")) if report}
        return tuple(reports[version] for version in sorted(reports))


def read_records(paths: RunPaths) -> RunRecords:
    """Read the files of a run as they are now. Torn lines, and files that are not there yet, are passed over."""
    lines = [_step_of(line) for line in read_lines(paths.metrics) if isinstance(line.get("global_step"), int)]
    standing = current_lines([{"global_step": step.global_step, "line": step} for step in lines])
    steps = tuple(entry["line"] for entry in standing if isinstance(entry["line"], StepFigures))
    stands = {id(step) for step in steps}
    failed = retried = 0
    for line in read_lines(paths.ledger):
        failed += _count(line.get("rollouts_failed"))
        retried += _count(line.get("rollouts_retried"))
    return RunRecords(
        steps=steps,
        taken_back=tuple(step for step in lines if id(step) not in stands),
        rollouts_failed=failed,
        rollouts_retried=retried,
        events=tuple(_event_of(line) for line in read_lines(paths.events)),
    )


def _step_of(line: Mapping[str, object]) -> StepFigures:
    kept = {key: number_of(value) for key, value in line.items() if key in KEPT_METRICS or key.startswith(KEPT_PREFIX)}
    return StepFigures(global_step=_count(line["global_step"]), attempt=_count(line.get("attempt")), figures=kept)


def _event_of(line: Mapping[str, object]) -> Event:
    step = line.get("global_step")
    return Event(
        name=str(line.get("event", "")),
        global_step=step if isinstance(step, int) else None,
        subject=str(line.get("subject", "")),
        reason=str(line.get("reason", "")),
        facts=line,
    )


def _eval_of(event: Event) -> EvalReport | None:
    version, prompts = event.facts.get("policy_version"), event.facts.get("prompts")
    sampled, greedy = number_of(event.facts.get("sampled")), number_of(event.facts.get("greedy"))
    if not isinstance(version, int) or not isinstance(prompts, int) or math.isnan(sampled) or math.isnan(greedy):
        return None
    return EvalReport(policy_version=version, prompts=prompts, sampled=sampled, greedy=greedy)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
