"""What a batch's passes say of it, as one UpdateStats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actors.model.objective import BEHAVE_FIGURES, Batch, Objective, Sums
from actors.model.update_stats import UpdateStats
from launcher.base.rollouts import RolloutGroup
from launcher.config.schema import ActorConfig


def stats_of(
    objective: Objective,
    minibatches: Sequence[Batch],
    groups: Sequence[RolloutGroup],
    passes: Sequence[tuple[Sums, float]],
    *,
    looked: Sums | None,
    actor: ActorConfig,
    policy_version: int,
    rate: float,
) -> UpdateStats:
    """Means over the tokens of the passes so far; distances of the complete batch, at the weights before it.

    `minibatches`: all of the batch; `passes`: sums and gradient norm of the first of them. `looked`: sums of a forward
    pass over all before the first, where there was one. `rate`: the learning rate.
    """
    done = minibatches[: len(passes)]
    n_tokens = sum(batch.n_tokens for batch in done)
    sums = objective.join([sums for sums, _ in passes])
    figures = objective.figures(n_tokens, sums)
    figures["loss"] /= len(done)
    grad_norm = sum(norm for _, norm in passes) / len(done)
    if looked is not None:
        seen = objective.figures(sum(batch.n_tokens for batch in minibatches), looked)
        figures |= {name: seen[name] for name in ("distance", "farthest")}
    kl_ref, entropy, distance, farthest = (figures.pop(name) for name in ("kl_ref", "entropy", "distance", "farthest"))
    behave_weight, behave_over_cap = (figures.pop(name) for name in BEHAVE_FIGURES)
    penalty = objective.penalties(groups).mean().item() if actor.overlong_reward_penalty else None
    apart = objective.distance(
        groups, sums if looked is None else looked, mean=distance, farthest=farthest, version=policy_version
    )
    checked = {"loss": figures["loss"], "gradient norm": grad_norm, "distance of log-probs": distance}
    overflow = _overflow_of_rewards(done, groups)
    return UpdateStats(
        **figures,
        grad_norm=grad_norm,
        learning_rate=rate,
        kl_ref=kl_ref if actor.needs_reference else None,
        entropy=entropy if minibatches[0].has_entropy else None,
        overlong_penalty=penalty,
        logprob_distance=apart,
        n_learning=sum(batch.n_learning for batch in done),
        n_tokens=n_tokens,
        padding_ratio=1 - sum(batch.n_given for batch in done) / sum(batch.n_in_rows for batch in done),
        n_micro_batches=sum(len(batch.micro_batches) for batch in done),
        n_minibatches=len(minibatches),
        behave_weight=behave_weight if actor.use_decoupled_loss else None,
        behave_over_cap=behave_over_cap if actor.use_decoupled_loss else None,
        problems=(*overflow, *(f"{name} is {value}" for name, value in checked.items() if not math.isfinite(value))),
        is_of_rewards=bool(overflow),
    )


def _overflow_of_rewards(minibatches: Sequence[Batch], groups: Sequence[RolloutGroup]) -> tuple[str, ...]:
    """Where advantages are not finite before any weight has met them, the rewards alone made them so."""
    if all(bool(batch.advantages.isfinite().all()) for batch in minibatches):
        return ()
    rewards = [one.reward for group in groups for one in group.rollouts]
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if missing := len(rewards) - len(known):
        return (f"{missing} of {len(rewards)} rewards are not numbers",)
    return (f"rewards from {min(known):.3g} to {max(known):.3g} have no finite advantages",)
