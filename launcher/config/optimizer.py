"""The settings of the optimizer: AdamW, or another class by import path (docs/recipes.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.settings import NATURAL, POSITIVE, between, matching, setting

ADAMW = "adamw"
BETA = {"ge": 0, "lt": 1}


@dataclass
class OptimizerConfig:
    type: str = setting(
        ADAMW,
        "optimizer; adamw: torch's AdamW, fused; or another class by import path, e.g. torchao.optim:AdamW8bit "
        "(docs/recipes.md)",
        matching(r"adamw|[A-Za-z_][\w.]*:[A-Za-z_]\w*", "adamw, or module:Class"),
    )
    lr: float = setting(1.7e-5, "learning rate after the warm-up", POSITIVE)
    weight_decay: float = setting(0.01, "decoupled weight decay, as in AdamW", NATURAL)
    beta1: float = setting(0.9, "decay rate of the first moment", BETA)
    beta2: float = setting(0.999, "decay rate of the second moment", BETA)
    eps: float = setting(1e-8, "number added to the root of the second moment", POSITIVE)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant", "course of the learning rate after the warm-up"
    )
    warmup_steps: int = setting(
        0, "number of steps in which the learning rate rises linearly to actor.optimizer.lr", NATURAL
    )
    min_lr_ratio: float = setting(
        0.0, "learning rate at the end of linear and cosine, as a share of actor.optimizer.lr", between(0, 1)
    )
    gradient_clipping: float = setting(
        1.0, "upper limit of the gradient's norm; a larger gradient is scaled down", POSITIVE
    )
