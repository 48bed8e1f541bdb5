"""What settings of AReaL, TRL, verl and earlier versions are called here: an unknown key is answered with ours.

Each value begins with a setting of this project; what follows says where its meaning differs.
"""

from __future__ import annotations

from collections.abc import Mapping

_MICRO_BATCHES = "actor.mb_spec.max_tokens_per_mb (of tokens: a batch is cut by itself, and its gradients are summed)"
_PROMPTS = "train_dataset.batch_size (prompts of a step, of all processes together)"
_DEVIATION = "actor.reward_norm.std_level (group or batch; null: not divided by a deviation)"
_STEPS = "actor.optimizer.warmup_steps (a number of steps, not a share)"

OTHER_KEYS: Mapping[str, str] = {
    "exp_ctrl.ckpt_freq_secs": "recover.freq_secs",
    "exp_ctrl.ckpt_freq_steps": "recover.freq_steps",
    "dataset.train_bs_n_seqs": "train_dataset.batch_size (prompts; dataset.train_bs_n_seqs is the same number)",
    "actor.adv_norm.std": "actor.reward_norm.std_level=group, or null (actor.adv_norm is over the batch, as in AReaL)",
    "actor.mask_no_eos_with_zero": "actor.mask_truncated_completions, which leaves them out of the loss (AReaL sets "
    "their reward to 0)",
    **dict.fromkeys(("beta", "actor.beta"), "actor.kl_loss_coef (with actor.kl_loss_type=k3, as TRL)"),
    **dict.fromkeys(("epsilon", "actor.epsilon"), "actor.eps_clip"),
    **dict.fromkeys(("epsilon_high", "actor.epsilon_high"), "actor.eps_clip_higher"),
    **dict.fromkeys(("delta", "actor.delta"), "actor.c_clip"),
    "data.train_files": "train_dataset.path",
    "data.val_files": "valid_dataset.path",
    "model": "actor.path",
    "custom_reward_function.path": "reward.fn=module:function",
    "reward_model.path": "reward.fn=module:function, which may ask a model of yours (docs/data_rewards_episodes.md)",
    "actor_rollout_ref.model.path": "actor.path",
    "algorithm.filter_groups.enable": "actor.dynamic_sampling (docs/recipes.md)",
    "rollout.backend": "sglang.n_servers, sglang.tp_size and sglang.dp_size (rollouts are always SGLang's)",
    "actor.backend": "actor.dp_size (the trainer is always this project's; another one: docs/adapters.md)",
}
"""By the complete key."""

OTHER_NAMES: Mapping[str, str] = {
    # AReaL
    "allocation_mode": "sglang.n_servers, sglang.tp_size and sglang.dp_size (servers), actor.dp_size (trainer)",
    "group_size": "gconfig.n_samples",
    "dynamic_bs": "actor.dynamic_sampling=1 (groups whose rewards are all equal are left out; AReaL's filter is code)",
    "warmup_steps_proportion": _STEPS,
    "async_training": "rollout.max_head_offpolicyness (0: synchronous)",
    # TRL
    "num_generations": "gconfig.n_samples",
    "learning_rate": "actor.optimizer.lr",
    "loss_type": "actor.loss_aggregation, actor.policy_loss or actor.importance_sampling_level (docs/recipes.md)",
    "scale_rewards": _DEVIATION,
    "max_completion_length": "gconfig.max_new_tokens",
    "max_prompt_length": "train_dataset.max_length (longer prompts are left out, not cut)",
    "max_steps": "total_train_steps",
    "num_train_epochs": "total_train_epochs",
    "per_device_train_batch_size": _PROMPTS,
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "warmup_ratio": _STEPS,
    "model_name_or_path": "actor.path",
    "dataset_name": "train_dataset.path",
    "reward_funcs": "reward.fn=module:function, several joined by +",
    "reward_weights": "reward.weights",
    "output_dir": "cluster.fileroot",
    "run_name": "trial_name",
    "report_to": "stats_logger.wandb.mode",
    "save_steps": "saver.freq_steps",
    "eval_steps": "evaluator.freq_steps",
    "bf16": "actor.dtype=bfloat16",
    "use_peft": "actor.use_lora",
    "lora_r": "actor.lora_rank",
    "vllm_gpu_memory_utilization": "sglang.mem_fraction_static",
    # verl
    "n": "gconfig.n_samples",
    "train_batch_size": _PROMPTS,
    "max_response_length": "gconfig.max_new_tokens",
    "ppo_mini_batch_size": "actor.ppo_n_minibatches (the number of parts of a batch, not their size)",
    "ppo_micro_batch_size": _MICRO_BATCHES,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCHES,
    "ppo_max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_mb",
    "use_kl_loss": "actor.kl_loss_coef (above 0: a KL in the loss)",
    "use_kl_in_reward": "actor.kl_ctl (above 0: a KL off the reward)",
    "kl_coef": "actor.kl_ctl",
    "clip_ratio": "actor.eps_clip",
    "clip_ratio_low": "actor.eps_clip",
    "clip_ratio_high": "actor.eps_clip_higher",
    "clip_ratio_c": "actor.c_clip",
    "loss_agg_mode": "actor.loss_aggregation",
    "adv_estimator": "actor.reward_norm (advantages are GRPO's; docs/recipes.md)",
    "norm_adv_by_std_in_grpo": _DEVIATION,
    "grad_clip": "actor.optimizer.gradient_clipping",
    "gpu_memory_utilization": "sglang.mem_fraction_static",
    "tensor_model_parallel_size": "sglang.tp_size",
    "total_epochs": "total_train_epochs",
    "total_training_steps": "total_train_steps",
    "save_freq": "saver.freq_steps",
    "test_freq": "evaluator.freq_steps",
    "default_local_dir": "cluster.fileroot",
}
"""By the last name of a key, in whichever section it was given."""


def name_here(key: str) -> str | None:
    """The setting to use in the place of an unknown key, with what differs; None where none is known."""
    return OTHER_KEYS.get(key) or OTHER_NAMES.get(key.rpartition(".")[2])
