"""The gradients of a batch, and how far each of its servers is from the trainer.

With actor.dynamic_sampling groups whose rewards are all equal are left out. Those of a server with damaged weights are:
nothing that it made would ever be compared, while it used up prompts. So of each server that made nothing else, one
group is compared: a forward pass, and a backward pass too where a sequence without an advantage has a gradient (a KL,
an entropy, a mean over the batch), which is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from actors.model.update_stats import UpdateStats
from launcher.base.rollouts import RolloutBatch, RolloutGroup


class Model(Protocol):
    """A `PolicyModel`."""

    def compute_gradients(self, groups: Sequence[RolloutGroup]) -> UpdateStats: ...


def gradients_of(model: Model, batch: RolloutBatch) -> UpdateStats:
    """`compute_gradients` of what is trained on, which waits for the commit. Its distances are of all servers."""
    unseen = batch.unseen_groups
    if not unseen:
        return model.compute_gradients(batch.groups)
    others = model.compute_gradients(unseen).logprob_distance  # the next call drops its gradients
    stats = model.compute_gradients(batch.groups)
    distance = stats.logprob_distance.beside(others, makers=_makers(batch.groups), other_makers=_makers(unseen))
    return replace(stats, logprob_distance=distance)


def _makers(groups: Iterable[RolloutGroup]) -> set[str]:
    return {rollout.completion.server for group in groups for rollout in group.rollouts}
