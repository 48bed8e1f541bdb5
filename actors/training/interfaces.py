"""What the step loop drives, a source of rollouts and the gate that admits a batch, and what it shows of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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

    `admit` is of the batch that was checked last. It raises Stopped when asked to stop while it waits for the answer.
    `rejected` is told of each batch that is not trained on, whoever decided it.
    """

    def check(self, batch: RolloutBatch, *, policy_version: int, global_step: int) -> Admission: ...

    def admit(self, batch: RolloutBatch, stats: UpdateStats) -> Admission: ...

    def rejected(self) -> None: ...


@dataclass
class Phase:
    """What the loop is doing; read from other threads."""

    name: str = "start"
    since: float = field(default_factory=time.monotonic)
    entered: int = 0

    def enter(self, name: str) -> None:
        self.name, self.since = name, time.monotonic()
        self.entered += 1
