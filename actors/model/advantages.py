"""Rewards to advantages, as plain tensor functions: normalisation, the overlong penalty, a KL off the reward.

    rewards ─ overlong_penalty ─ group_advantages (reward_norm) ─ kl_to_come (kl_ctl) ─ batch_moments (adv_norm)

Formulas: GRPO from DeepSeekMath (arXiv 2402.03300), Dr. GRPO (2503.20783, no deviation), the overlong penalty from DAPO
(2503.14476). For what papers leave open AReaL 1.0.4 is followed (`PPOActor._compute_advantages`, `Normalization`);
`python -m scripts.lab.compare_losses` compares with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from launcher.config.recipe import AdvNormConfig, RewardNormConfig


def group_advantages(rewards: Tensor, norm: RewardNormConfig) -> Tensor:
    """Rewards [groups, n] to advantages [groups, n].

    The deviation is the unbiased one, about the mean that is taken off; 0 for n = 1. Where all rewards that a mean is
    of are equal, the advantages are exact zeros: the mean of equal floats may be off in its last bit, and division by
    `eps` would make a signal of that.
    """
    mean, spread = torch.zeros_like(rewards), torch.ones_like(rewards)
    if norm.mean_level is not None:
        mean = _over(rewards, norm.mean_level, lambda these: these.mean(dim=1, keepdim=True))
        spread = _over(rewards, norm.mean_level, lambda these: these.amax(dim=1, keepdim=True) - these.amin(1, True))
    advantages = rewards - mean
    if norm.std_level is not None and rewards.shape[1] > 1:
        if norm.std_level == norm.mean_level:
            deviation = _over(rewards, norm.std_level, lambda these: these.std(dim=1, keepdim=True, unbiased=True))
        else:
            deviation = _over(advantages, norm.std_level, _deviation_about_0)
        advantages = advantages / (deviation + norm.eps)
    return torch.where(spread == 0, torch.zeros_like(advantages), advantages)


def _over(values: Tensor, level: str, figure: Callable[[Tensor], Tensor]) -> Tensor:
    return figure(values if level == "group" else values.reshape(1, -1))


def _deviation_about_0(values: Tensor) -> Tensor:
    return (values.square().sum(dim=1, keepdim=True) / (values.shape[1] - 1)).sqrt()


def overlong_penalty(lengths: Tensor, *, max_tokens: int, overlong_tokens: int, factor: float) -> Tensor:
    """What is added to the reward of a completion: 0 up to `max_tokens` - `overlong_tokens`, then down to -`factor`."""
    exceeded = (lengths - (max_tokens - overlong_tokens)).clamp(min=0)
    return -exceeded / overlong_tokens * factor


def kl_to_come(kl: Tensor, sequences: Tensor) -> Tensor:
    """For each token the sum of `kl` from it to the end of its sequence, whose tokens follow each other."""
    _, lengths = torch.unique_consecutive(sequences, return_counts=True)
    pieces = kl.tensor_split(lengths.cumsum(0)[:-1].cpu())
    return torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in pieces])


def batch_normalised(
    advantages: Sequence[Tensor], counted: Sequence[Tensor], norm: AdvNormConfig, total: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Advantages of tokens, in parts of the batch, normalised over all whose `counted` is 1.

    `total` adds up what each rank has. The deviation is the unbiased one, about the mean that is taken off.
    """

    def over_all(parts: Sequence[Tensor]) -> Tensor:
        masked = [(part * one).sum() for part, one in zip(parts, counted, strict=True)]
        return total(torch.stack(masked).sum())

    exact = [part.double() for part in advantages]
    count = over_all([torch.ones_like(part) for part in exact])
    if norm.mean_level is not None:
        mean = over_all(exact) / count.clamp(min=1)
        exact = [part - mean for part in exact]
    if norm.std_level is not None and count > 1:
        deviation = (over_all([part.square() for part in exact]) / (count - 1)).sqrt()
        exact = [part / (deviation + norm.eps) for part in exact]
    return [part.float() for part in exact]
