"""May this batch be trained on? The gate's decision, from what is known of the batch alone.

A batch that a failure made must never reach the optimizer (P1). Each rule names what it saw, so that the journal
can say why a batch was turned away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.messages import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What the gate is told of a batch. Counts are of completions, `weight_versions` those their tokens came from."""

    policy_version: int
    weight_versions: tuple[int, ...]
    completions: int
    without_reward: int
    empty: int
    nonfinite_logprobs: int
    uneven_groups: int

    @classmethod
    def of(cls, batch: RolloutBatch, *, policy_version: int, n_samples: int) -> BatchReport:
        completions = [rollout.completion for rollout in batch.rollouts]
        return cls(
            policy_version=policy_version,
            weight_versions=batch.weight_versions,
            completions=len(completions),
            without_reward=sum(r.reward is None or not math.isfinite(r.reward) for r in batch.rollouts),
            empty=sum(not c.token_ids for c in completions),
            nonfinite_logprobs=sum(not all(map(math.isfinite, c.logprobs)) for c in completions),
            uneven_groups=sum(len(group.rollouts) != n_samples for group in batch.groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    admitted: bool
    reason: str


def admit(report: BatchReport) -> Admission:
    """Admit a batch only if every completion is whole, scored, and from the weights being trained."""
    faults = {
        "no completions": report.completions == 0,
        f"{report.without_reward} completions without a reward": report.without_reward > 0,
        f"{report.empty} empty completions": report.empty > 0,
        f"{report.nonfinite_logprobs} completions with non-finite log-probs": report.nonfinite_logprobs > 0,
        f"{report.uneven_groups} groups that are not whole": report.uneven_groups > 0,
        f"weight versions {list(report.weight_versions)}, not {report.policy_version}": bool(report.completions)
        and report.weight_versions != (report.policy_version,),
    }
    seen = [fault for fault, found in faults.items() if found]
    return Admission(admitted=not seen, reason="; ".join(seen) or "whole, scored and current")
