"""The settings of the objective: how rewards become advantages, and advantages a loss (docs/recipes.md).

Names and meanings are AReaL's where AReaL has the setting, else TRL's or verl's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.config.settings import COUNT, NATURAL, POSITIVE, between, part, same_as, setting

Level = Literal["group", "batch"]
Estimator = Literal["k1", "k2", "k3"]
EPS_OF_TOKENS = 1e-5


@dataclass
class RewardNormConfig:
    """Rewards to advantages: less a mean, over a standard deviation about it (divisor n - 1)."""

    mean_level: Level | None = setting(
        "group",
        "whose mean is subtracted from a reward: that of its group or of the batch; null: no mean is subtracted",
    )
    std_level: Level | None = setting(
        "group",
        "by whose standard deviation a reward is divided: that of its group or of the batch; null: it is not divided",
    )
    eps: float = setting(1e-6, "number added to this standard deviation", POSITIVE)


@dataclass
class AdvNormConfig:
    """After reward_norm, and after the KL of kl_ctl: the same over the tokens of the batch."""

    mean_level: Literal["batch"] | None = setting(
        None, "subtract the mean over the batch's tokens from the advantages; null: no mean is subtracted"
    )
    std_level: Literal["batch"] | None = setting(
        None,
        "divide the advantages by the standard deviation over the batch's tokens; null: they are not divided",
    )
    eps: float = setting(EPS_OF_TOKENS, "number added to this standard deviation", POSITIVE)


@dataclass
class RecipeConfig:
    """A part of `actor`."""

    ppo_n_minibatches: int = setting(
        1, "optimizer steps per batch, each on one part of it; more than 1 adds a forward pass", COUNT
    )
    dynamic_sampling: int | None = setting(
        None,
        "leave out groups whose rewards are all equal and replace them, with the prompts of at most this many "
        "batches a step; 1: not replaced; null: such groups stay in the batch",
        COUNT,
    )
    reward_norm: RewardNormConfig = part(RewardNormConfig)
    adv_norm: AdvNormConfig = part(AdvNormConfig)
    policy_loss: Literal["ppo", "cispo"] = setting(
        "ppo",
        "policy loss; ppo: the clipped ratio times the advantage; cispo: the log-prob times the advantage and the "
        "clipped ratio, which has no gradient",
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token",
        "ratio that is clipped; token: each token's own; sequence: the geometric mean over the sequence's tokens "
        "(GSPO)",
    )
    eps_clip: float = setting(
        0.2, "distance below 1 at which the ratio is clipped; 1: not clipped from below", between(0, 1)
    )
    eps_clip_higher: float | None = setting(
        0.28, "distance above 1 at which the ratio is clipped; null: the same as actor.eps_clip", NATURAL
    )
    c_clip: float | None = setting(
        None,
        "upper limit of the ratio where the advantage is negative (dual clip); null: no limit",
        {"gt": 1},
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = setting(
        "token_mean",
        "how the loss is averaged; token_mean: over tokens; sequence_mean: over sequences; constant_length: each "
        "sequence's sum is divided by actor.max_new_tokens, then a mean over sequences (Dr. GRPO)",
    )
    max_new_tokens: int = same_as(
        "gconfig.max_new_tokens", "length that constant_length and actor.overlong_tokens refer to, in tokens", COUNT
    )
    overlong_reward_penalty: bool = setting(
        False, "subtract a penalty from the reward of completions that are nearly too long"
    )
    overlong_tokens: int | None = setting(
        None, "length of the zone before actor.max_new_tokens in which the penalty grows, in tokens", COUNT
    )
    overlong_penalty_factor: float | None = setting(
        None, "penalty at actor.max_new_tokens, subtracted from the reward", POSITIVE
    )
    mask_truncated_completions: bool = setting(
        False, "leave completions cut at the length limit out of the loss; their rewards still count in the means"
    )
    entropy_coeff: float = setting(0.0, "weight of the entropy, which is subtracted from the loss", NATURAL)
    # 5: a diagnosis compares the 30 steps before a fall with the 10 after it, and needs five and two with the figure,
    # which it has where ten steps follow a fall: two take 6 to 10 steps
    entropy_freq_steps: int | None = setting(
        5,
        "number of steps from one that computes the entropy to the next, where the loss does without (it takes time); "
        "null: none computes it",
        COUNT,
    )
    kl_ctl: float = setting(
        0.0,
        "weight of the KL to the reference model that is subtracted from the reward at each token; above 0 the "
        "reference model is loaded",
        NATURAL,
    )
    kl_estimator: Estimator = setting("k1", "Schulman's estimator of the KL in the reward (actor.kl_ctl)")
    kl_loss_coef: float = setting(
        0.0,
        "weight of the KL to the reference model as a term of the loss; above 0 the reference model is loaded",
        NATURAL,
    )
    kl_loss_type: Estimator = setting(
        "k3",
        "Schulman's estimator of the KL in the loss (actor.kl_loss_coef); the gradient of k1 contains no KL",
    )
    recompute_logprob: bool = setting(
        False,
        "take the old log-probs from the trainer instead of the server; with actor.ppo_n_minibatches=1 every "
        "ratio is then 1 and nothing is clipped",
    )
    use_decoupled_loss: bool = setting(
        False,
        "clip against the trainer's log-probs before the batch, and weight each token's loss by the ratio of "
        "these log-probs to those of the weights that made the token (for rollout.max_head_offpolicyness)",
    )
    behave_imp_weight_cap: float = setting(5.0, "upper limit of the token weights of the decoupled loss", between(1))
    behave_imp_weight_mode: Literal["token_truncate", "token_mask"] = setting(
        "token_truncate",
        "treatment of a token weight above actor.behave_imp_weight_cap; token_truncate: it becomes the limit "
        "(TIS); token_mask: it becomes 0 (MIS)",
    )

    @property
    def recomputes(self) -> bool:
        """Ratios are to the trainer's own log-probs."""
        return self.recompute_logprob or self.use_decoupled_loss

    def computes_entropy(self, policy_version: int) -> bool:
        """In the step after so many."""
        is_due = self.entropy_freq_steps is not None and policy_version % self.entropy_freq_steps == 0
        return self.entropy_coeff > 0 or is_due

    @property
    def needs_reference(self) -> bool:
        return self.kl_ctl > 0 or self.kl_loss_coef > 0


def find_recipe_problems(actor: RecipeConfig, *, batch_size: int) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed."""
    if actor.ppo_n_minibatches > batch_size:
        yield "actor.ppo_n_minibatches", f"at most train_dataset.batch_size={batch_size}: a group isn't divided"
    if actor.dynamic_sampling is not None and actor.reward_norm.mean_level != "group":
        yield (
            "actor.dynamic_sampling",
            "null without actor.reward_norm.mean_level=group: a group whose rewards are all equal has a signal then",
        )
    if actor.policy_loss == "cispo" and actor.c_clip is not None:
        yield "actor.c_clip", "null with actor.policy_loss=cispo, which clips the ratio whatever the advantage"
    for key in ("overlong_tokens", "overlong_penalty_factor"):
        if actor.overlong_reward_penalty and getattr(actor, key) is None:
            yield f"actor.{key}", "a number is needed with actor.overlong_reward_penalty=true"
        if not actor.overlong_reward_penalty and getattr(actor, key) is not None:
            yield f"actor.{key}", "null without actor.overlong_reward_penalty=true"
    if actor.overlong_reward_penalty and (actor.overlong_tokens or 0) > actor.max_new_tokens:
        yield "actor.overlong_tokens", f"at most actor.max_new_tokens={actor.max_new_tokens}"
    if actor.adv_norm.std_level is None and actor.adv_norm.eps != EPS_OF_TOKENS:
        yield "actor.adv_norm.eps", "not given without actor.adv_norm.std_level; a group's is actor.reward_norm.eps"


def describe_recipe(actor: RecipeConfig) -> str:
    """One line for the plan."""
    high = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
    ratio = f"{actor.importance_sampling_level} ratio in {1 - actor.eps_clip:g} … {1 + high:g}"
    if actor.recomputes and actor.ppo_n_minibatches == 1:
        ratio = "ratio 1, as old log-probs are the trainer's own: nothing is clipped"
    norm, over = actor.reward_norm, actor.adv_norm
    parts = [
        f"{actor.policy_loss}, {ratio}",
        *([_decoupled(actor)] if actor.use_decoupled_loss else []),
        *([f"at most {actor.c_clip:g} where the advantage is negative"] if actor.c_clip is not None else []),
        f"loss: {actor.loss_aggregation}",
        *([_replaced(actor.dynamic_sampling)] if actor.dynamic_sampling is not None else []),
        "advantage: the reward"
        + (f" less the {norm.mean_level}'s mean" if norm.mean_level else "")
        + (f", over the {norm.std_level}'s deviation" if norm.std_level else ""),
        *(["advantages normalised over the batch's tokens"] if over.mean_level or over.std_level else []),
        *([f"overlong penalty in the last {actor.overlong_tokens} tokens"] if actor.overlong_reward_penalty else []),
        *(["truncated completions left out"] if actor.mask_truncated_completions else []),
        *([f"entropy × {actor.entropy_coeff:g}"] if actor.entropy_coeff else []),
        *([f"{actor.kl_estimator} KL × {actor.kl_ctl:g} off the reward"] if actor.kl_ctl else []),
        *([f"{actor.kl_loss_type} KL × {actor.kl_loss_coef:g} in the loss"] if actor.kl_loss_coef else []),
        f"{actor.ppo_n_minibatches} optimizer step{'s' if actor.ppo_n_minibatches > 1 else ''} a batch",
    ]
    return "objective: " + "; ".join(parts)


def _replaced(batches: int) -> str:
    within = f" and replaced, within the prompts of {batches} batches a step" if batches > 1 else ""
    return f"groups whose rewards are all equal are left out{within}"


def _decoupled(actor: RecipeConfig) -> str:
    over = "left out" if actor.behave_imp_weight_mode == "token_mask" else "truncated"
    return f"decoupled: weighed by the ratio to the sampling weights, {over} above {actor.behave_imp_weight_cap:g}"
