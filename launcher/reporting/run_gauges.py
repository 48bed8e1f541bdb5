"""The figures of a run for Prometheus: names, units, values. Pure; launcher/cli/ray_metrics.py exports them.

Ray puts `ray_` before each name. A figure that is not known has no value, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from launcher.base.messages import EvalReport, ServerInfo, ServerState, TrainerStatus
from launcher.policy.observed import RunState
from launcher.reporting.run_facts import RunFacts

GAUGES: Mapping[str, str] = {
    "grpo_next_step": "Step that the trainer is at",
    "grpo_total_steps": "Steps of the run",
    "grpo_policy_version": "Version of the trainer's weights",
    "grpo_servers": "SGLang servers by state",
    "grpo_eval_accuracy": "Accuracy on held-out prompts, by kind: sampled, greedy",
    "grpo_run_state": "1 for the state that the run is in, else 0",
    "grpo_last_step": "Newest committed step that a restore has not undone",
    "grpo_last_step_time_seconds": "When it was committed, in unix seconds",
    "grpo_step_seconds": "What it took",
    "grpo_usual_step_seconds": "Median over the steps of the run",
    "grpo_reward": "Mean reward of the newest step",
    "grpo_tokens_per_second": "Tokens generated in the newest step, per second of its rollout",
    "grpo_checkpoint_step": "Newest checkpoint that is neither condemned nor deleted",
    "grpo_checkpoint_time_seconds": "When it was committed, in unix seconds",
    "grpo_incidents": "Incidents so far, by cause",
    "grpo_incidents_open": "Incidents that are not over",
    "grpo_repair_seconds": "Mean time from the beginning of an incident to its repair, of those repaired",
    "grpo_restores": "Restores of a checkpoint so far",
    "grpo_steps_undone": "Committed steps that restores undid",
    "grpo_batches_rejected": "Batches that the admission gate rejected",
    "grpo_ettr": "Time of the steps that count, as a share of all time, from 0 to 1",
    "grpo_memory_used_bytes": "Memory in use, by device",
    "grpo_memory_total_bytes": "Memory that there is, by device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value of the gauge `name` of GAUGES."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def gauges_of_status(
    status: TrainerStatus, servers: Sequence[ServerInfo], evals: Sequence[EvalReport]
) -> Iterator[Reading]:
    """What now.json says of the trainer about once a second."""
    yield Reading(name="grpo_next_step", value=status.next_step)
    yield Reading(name="grpo_total_steps", value=status.total_steps)
    yield Reading(name="grpo_policy_version", value=status.policy_version)
    counts = Counter(server.state for server in servers)
    for state in ServerState:
        yield Reading(name="grpo_servers", value=counts[state], labels={"state": state})
    if evals:
        yield Reading(name="grpo_eval_accuracy", value=evals[-1].sampled, labels={"kind": "sampled"})
        yield Reading(name="grpo_eval_accuracy", value=evals[-1].greedy, labels={"kind": "greedy"})


def gauges_of_facts(facts: RunFacts) -> Iterator[Reading]:
    """What the run's files say, as its report does."""
    for name, value, labels in _figures(facts):
        if value is not None and math.isfinite(value):
            yield Reading(name=name, value=value, labels=labels)


def _figures(facts: RunFacts) -> Iterator[tuple[str, float | None, Mapping[str, str]]]:
    if facts.states:
        for state in RunState:
            yield "grpo_run_state", float(facts.states[-1][1] == state), {"state": state}
    if facts.steps:
        last = facts.steps[-1]
        yield "grpo_last_step", last.step, {}
        yield "grpo_last_step_time_seconds", last.time or None, {}
        yield "grpo_step_seconds", last.step_s, {}
        yield "grpo_reward", last.reward, {}
        yield "grpo_tokens_per_second", last.tokens_per_s, {}
    yield "grpo_usual_step_seconds", facts.losses.usual_step_s, {}
    yield "grpo_ettr", facts.losses.ettr, {}
    if kept := [one for one in facts.checkpoints if not one.fate]:
        newest = max(kept, key=lambda one: one.time)
        yield "grpo_checkpoint_step", newest.step, {}
        yield "grpo_checkpoint_time_seconds", newest.time or None, {}
    for cause, count in Counter(one.cause for one in facts.incidents).items():
        yield "grpo_incidents", count, {"cause": cause}
    yield "grpo_incidents_open", sum(one.is_mended is None for one in facts.incidents), {}
    repairs = [one.repaired_s for one in facts.incidents if one.repaired_s is not None]
    yield "grpo_repair_seconds", fmean(repairs) if repairs else None, {}
    yield "grpo_restores", len(facts.restores), {}
    yield "grpo_steps_undone", sum(map(len, facts.taken_back)), {}
    yield "grpo_batches_rejected", facts.rejected, {}
    for device, (used, total) in (facts.memory[-1].in_use if facts.memory else {}).items():
        yield "grpo_memory_used_bytes", used, {"device": device}
        yield "grpo_memory_total_bytes", total, {"device": device}
