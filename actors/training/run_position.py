"""The position of a run: the counters that a checkpoint holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from launcher.base.messages import EvalReport
from launcher.checkpoints.checkpoint_store import CheckpointName

STEPS_KEPT = 20
"""Last steps whose rewards a checkpoint's manifest averages as its health, and whose distances are the usual one."""

DISTANCES_LEAST = 5
"""Steps whose median distance counts as usual; before that it is chance."""

EVALS_KEPT = 100
"""The first and the newest: each state in memory and each view of the trainer holds them. events.jsonl has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """`next_step` counts from 0; `epoch_step` is its number within `epoch`."""

    next_step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    last_epoch: int = 0
    last_epoch_step: int = 0
    recent_rewards: tuple[float, ...] = ()
    recent_distances: tuple[float, ...] = ()
    evals: tuple[EvalReport, ...] = ()

    @property
    def checkpoint_name(self) -> CheckpointName | None:
        """Of the checkpoint that holds the last step; None before the first."""
        if self.next_step == 0:
            return None
        return CheckpointName(epoch=self.last_epoch, epoch_step=self.last_epoch_step, global_step=self.next_step - 1)

    @property
    def usual_distance(self) -> float | None:
        """Between the log-probs of servers and trainer with the same weights, in nats; None where too few are known."""
        known = self.recent_distances
        return median(known) if len(known) >= DISTANCES_LEAST else None

    def after_step(self, *, reward: float, epoch: int, distance: float | None = None) -> RunPosition:
        """The step was committed; `epoch` is the queue's, one further where that step ended an epoch. `distance`: of
        its batch, None where older weights made all of it."""
        return dataclasses.replace(
            self,
            next_step=self.next_step + 1,
            epoch=epoch,
            epoch_step=self.epoch_step + 1 if epoch == self.epoch else 0,
            last_epoch=self.epoch,
            last_epoch_step=self.epoch_step,
            recent_rewards=(*self.recent_rewards, reward)[-STEPS_KEPT:],
            recent_distances=(*self.recent_distances, *([] if distance is None else [distance]))[-STEPS_KEPT:],
        )

    def with_evals(self, evals: Sequence[EvalReport]) -> RunPosition:
        return dataclasses.replace(self, evals=(*evals[:1], *evals[1:][1 - EVALS_KEPT :]))

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunPosition:
        fields = dict(data)
        evals = tuple(EvalReport(**report) for report in fields.pop("evals"))
        rewards = tuple(fields.pop("recent_rewards"))
        distances = tuple(fields.pop("recent_distances", ()))  # older states have none
        return cls(evals=evals, recent_rewards=rewards, recent_distances=distances, **fields)
