"""GRPO as plain tensor functions: advantages, the clipped objective, the KL to a reference, and how tokens are weighed.

    rewards [groups, n] ─ group_advantages ─► advantages ─┐
    log-probs, old log-probs ─────────────────────────────┴─ clipped_terms ─► loss per token ─ · token_weights ─► loss

Formulas: GRPO from DeepSeekMath (arXiv 2402.03300), asymmetric clip and token mean from DAPO (arXiv 2503.14476).
The code that was followed for what the papers leave open (unbiased standard deviation, `std + eps`, what counts as
clipped) is trl 1.16.0, `GRPOTrainer._compute_loss` and `trainer.utils.nanstd`; tests compare with its figures.
A loss is a weighted sum whose weights come from the complete batch, so cutting the batch into pieces changes nothing.
NaN is never hidden: a reward or log-prob that is not a number makes what it touches not a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The clipped objective's figures for each token. All of one shape; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def group_advantages(rewards: Tensor, *, std: bool, eps: float) -> Tensor:
    """Rewards [groups, n] to advantages [groups, n]: less the group's mean, over its standard deviation if `std`.

    The deviation is the unbiased one (divisor n - 1), 0 for n = 1. A group whose rewards are all equal gets exact
    zeros: the mean of equal floats may be off in its last bit, and division by `eps` would make a signal of that.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if std and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True, unbiased=True) + eps)
    spread = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True)
    return torch.where(spread == 0, torch.zeros_like(advantages), advantages)


def clipped_terms(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_higher: float | None
) -> TokenTerms:
    """-min(r·A, clip(r, 1 - eps_clip, 1 + eps_clip_higher)·A) for each token, r = exp(logprob - old_logprob).

    `approx_kl` is (r - 1) - log r, never negative: how far the policy has moved from the one that sampled
    (Schulman's k3). A token counts as clipped only where the clip cuts its gradient off.
    """
    low, high = 1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    fixed = ratio.detach()
    return TokenTerms(
        loss=loss,
        ratio=fixed,
        approx_kl=(fixed - 1) - log_ratio.detach(),
        clipped_low=(fixed < low) & (advantages < 0),
        clipped_high=(fixed > high) & (advantages > 0),
    )


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) for each token: exp(ref - lp) - (ref - lp) - 1, never negative.

    Its gradient flows through `logprobs`; DeepSeekMath eq. 4.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def token_weights(lengths: Tensor, aggregation: str) -> Tensor:
    """The share [sequences] that each one token of a sequence has in the loss, for sequences of `lengths` tokens.

    token_mean: all tokens of the batch alike. sequence_mean: all sequences alike, and all tokens within one.
    `lengths` must be those of the full batch, not of a micro-batch: then sums over micro-batches add up to the mean.
    """
    lengths = lengths.to(torch.float32)
    match aggregation:
        case "token_mean":
            return (1 / lengths.sum()).expand_as(lengths)
        case "sequence_mean":
            return 1 / (lengths.clamp(min=1) * len(lengths))
        case _:
            raise ValueError(f"unknown loss aggregation {aggregation!r}")
