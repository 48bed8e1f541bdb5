"""A step's figures, from its batch and its gradients."""

from __future__ import annotations

from statistics import fmean

from actors.model.policy_model import UpdateStats
from launcher.base.rollouts import RolloutBatch


def batch_metrics(batch: RolloutBatch, stats: UpdateStats, max_new_tokens: int) -> dict[str, float]:
    """One step's figures by their WandB keys. Lengths are tokens, rewards the reward function's own."""
    rewards = [rollout.reward for rollout in batch.rollouts if rollout.reward is not None]
    lengths = [len(rollout.completion.token_ids) for rollout in batch.rollouts]
    cut = [rollout.completion.finish_reason == "length" for rollout in batch.rollouts]
    flat = [len({rollout.reward for rollout in group.rollouts}) == 1 for group in batch.groups]
    return {
        "grpo_actor/task_reward/avg": fmean(rewards),
        "grpo_actor/task_reward/min": min(rewards),
        "grpo_actor/task_reward/max": max(rewards),
        "rollout/reward": fmean(rewards),
        "rollout/accepted": float(len(batch.groups)),
        "rollout/failed": float(batch.failed),
        "rollout/retried": float(batch.retried),
        "rollout/tokens": float(batch.generated_tokens),
        "rollout/tokens_per_s": batch.generated_tokens / batch.seconds,
        "grpo_actor/n_seqs": float(len(rewards)),
        "grpo_actor/seq_len/avg": fmean(lengths),
        "grpo_actor/seq_len/max": float(max(lengths)),
        "grpo_actor/no_eos_ratios/avg": fmean(cut),
        "grpo_actor/flat_groups/avg": fmean(flat),
        **stats.metrics(),
    }
