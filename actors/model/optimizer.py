"""AdamW over float32 master weights, and the course of its learning rate.

The learning rate is a function of the step alone: there is no scheduler whose state could differ from the counter
after a restore.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from launcher.base.errors import ConfigError
from launcher.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay acts on matrices only: pulling norms and biases to zero does harm and no good."""
    if config.type != "adamw":
        raise ConfigError(f"actor.optimizer.type is {config.type!r}", "set actor.optimizer.type=adamw")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, *, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of the optimizer step that `step` steps (from 0) came before.

    Warm-up: (step + 1) / warmup_steps of lr, so that the first step already moves. Then constant, or down to
    min_lr_ratio · lr at `total_steps` along a line or half a cosine; it stays there if the run continues.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    match config.lr_scheduler_type:
        case "constant":
            share = 1.0
        case "linear":
            share = 1 - min(1.0, done)
        case "cosine":
            share = (1 + math.cos(math.pi * min(1.0, done))) / 2
        case other:
            raise ConfigError(
                f"actor.optimizer.lr_scheduler_type is {other!r}",
                "set actor.optimizer.lr_scheduler_type to constant, linear or cosine",
            )
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
