"""The losses as plain tensor functions: the clipped ratio, CISPO, the KL to a reference, and how tokens are weighed.

    log-probs, old log-probs ─ (sequence_mean_of) ─► log-ratio ─┐
    advantages (advantages.py) ─────────────────────────────────┴─ clipped_terms or cispo_terms ─► loss per token
                                                                            loss per token · token_weights ─► loss

Formulas: GRPO from DeepSeekMath (arXiv 2402.03300), asymmetric clip and token mean from DAPO (2503.14476), the
constant length from Dr. GRPO (2503.20783), the sequence's ratio from GSPO (2507.18071), CISPO from MiniMax-M1
(2506.13585), the dual clip from Ye et al. (1912.09729), the decoupled loss from Hilton et al. (2110.00641) and AReaL
(2505.24298). The code that was followed for what the papers leave open is
TRL 1.16.0, verl 0.9.1 and AReaL 1.0.4; `python -m scripts.lab.compare_losses` compares with theirs.
A loss is a weighted sum whose weights come from the complete batch, so cutting the batch into pieces changes nothing.
NaN is never hidden: a reward or log-prob that is not a number makes what it touches not a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """An objective's figures for each token. All of one shape; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def sequence_mean_of(values: Tensor, sequences: Tensor, *, n: int) -> Tensor:
    """For each token the mean over its sequence, of `n`: of log-ratios, whose exponential is GSPO's ratio."""
    sums, counts = values.new_zeros(2, n).unbind()
    sums = sums.index_add(0, sequences, values)
    counts = counts.index_add(0, sequences, torch.ones_like(values))
    return sums[sequences] / counts[sequences]


def clipped_terms(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None = None,
) -> TokenTerms:
    """-min(r·A, clip(r, 1 - eps_clip, 1 + eps_clip_higher)·A) for each token, r = exp(logprob - old_logprob).

    With `c_clip` the loss of a token with A < 0 is at most -c_clip·A. `approx_kl` is (r - 1) - log r, 0 or more but for
    rounding: how far the policy has moved from the one that sampled (Schulman's k3). A token counts as clipped only
    where a clip cuts its gradient off; as clipped high, where the dual clip does.
    """
    low, high = _bounds(eps_clip, eps_clip_higher)
    ratio = log_ratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    fixed = ratio.detach()
    clipped_high = (fixed > high) & (advantages > 0)
    if c_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -c_clip * advantages), loss)
        clipped_high = clipped_high | ((fixed > c_clip) & (advantages < 0))
    return TokenTerms(
        loss=loss,
        ratio=fixed,
        approx_kl=(fixed - 1) - log_ratio.detach(),
        clipped_low=(fixed < low) & (advantages < 0),
        clipped_high=clipped_high,
    )


def cispo_terms(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_higher: float | None
) -> TokenTerms:
    """-clip(r, 1 - eps_clip, 1 + eps_clip_higher)·A·logprob, the clipped ratio without a gradient: every token has one.

    `clipped_low` and `clipped_high`: where the ratio is outside, whatever the advantage.
    """
    low, high = _bounds(eps_clip, eps_clip_higher)
    fixed = log_ratio.detach().exp()
    return TokenTerms(
        loss=-fixed.clamp(low, high) * advantages * logprobs,
        ratio=fixed,
        approx_kl=(fixed - 1) - log_ratio.detach(),
        clipped_low=fixed < low,
        clipped_high=fixed > high,
    )


def behave_weights(proximal: Tensor, behaviour: Tensor, *, cap: float, masks: bool) -> tuple[Tensor, Tensor]:
    """The weight of each token's loss in the decoupled objective, exp(proximal - behaviour) without a gradient, and
    where that is more than `cap`: there it is `cap` (truncated), or 0 where it `masks`."""
    weights = (proximal - behaviour).detach().exp()
    is_over = weights > cap
    return torch.where(is_over, torch.full_like(weights, 0.0 if masks else cap), weights), is_over


def _bounds(eps_clip: float, eps_clip_higher: float | None) -> tuple[float, float]:
    return 1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Schulman's estimate of KL(policy ‖ reference) for each token: k1 lp - ref, k2 half its square, k3
    exp(ref - lp) - (ref - lp) - 1, which DeepSeekMath's eq. 4 has. The gradient flows through `logprobs`.
    """
    difference = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.exp() - difference - 1
        case _:
            raise ValueError(f"unknown estimator of a KL {estimator!r}")


def token_weights(lengths: Tensor, aggregation: str, *, constant: int = 0) -> Tensor:
    """The share [sequences] that each one token of a sequence has in the loss, for sequences of `lengths` tokens.

    token_mean: all tokens of the batch alike. sequence_mean: all sequences alike, and all tokens within one.
    constant_length: each sequence's sum over `constant`, sequences alike (Dr. GRPO).
    `lengths` must be those of the full batch, not of a micro-batch: then sums over micro-batches add up to the mean.
    """
    lengths = lengths.to(torch.float32)
    match aggregation:
        case "token_mean":
            return (1 / lengths.sum().clamp(min=1)).expand_as(lengths)
        case "sequence_mean":
            return 1 / (lengths.clamp(min=1) * len(lengths))
        case "constant_length":
            return torch.full_like(lengths, 1 / (constant * len(lengths)))
        case _:
            raise ValueError(f"unknown loss aggregation {aggregation!r}")
