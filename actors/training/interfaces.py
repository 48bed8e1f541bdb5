"""What the step loop drives: a source of rollouts, and the gate that admits a batch."""

from __future__ import annotations

from typing import Protocol

from actors.data.prompt_queue import PromptQueue
from actors.model.update_stats import UpdateStats
from launcher.base.messages import EvalReport
from launcher.base.rollouts import RolloutBatch
from launcher.policy.admission import Admission


class RolloutSource(Protocol):
    """Where batches come from. Raises Stopped when asked to stop while it waits."""

    def collect(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch: ...

    def evaluate(self, weight_version: int) -> EvalReport | None: ...


class Gate(Protocol):
    """May a batch be trained on? `check` before the gradients, `admit` before the weights move (an AdmissionGate).

    `admit` raises Stopped when asked to stop while it waits for the answer.
    """

    def check(self, batch: RolloutBatch, *, policy_version: int, global_step: int) -> Admission: ...

    def admit(self, batch: RolloutBatch, stats: UpdateStats, *, policy_version: int, global_step: int) -> Admission: ...
