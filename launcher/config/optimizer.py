"""The settings of the optimizer: AdamW, or another class by import path (docs/recipes.md)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.settings import NATURAL, POSITIVE, Between, Matching, OneOf, setting

ADAMW = "adamw"
BETA = Between(0, 1, open_high=True)


@dataclass
class OptimizerConfig:
    type: str = setting(
        ADAMW,
        "adamw: torch's, fused; or another class by import path, e.g. torchao.optim:AdamW8bit (docs/recipes.md)",
        Matching(r"adamw|[A-Za-z_][\w.]*:[A-Za-z_]\w*", "adamw, or module:Class"),
    )
    lr: float = setting(1.7e-5, "learning rate after the warm-up", POSITIVE)
    weight_decay: float = setting(0.01, "decoupled, as AdamW's", NATURAL)
    beta1: float = setting(0.9, "decay of the first moment", BETA)
    beta2: float = setting(0.999, "decay of the second moment", BETA)
    eps: float = setting(1e-8, "added to the root of the second moment", POSITIVE)
    lr_scheduler_type: str = setting(
        "constant", "course of the learning rate after the warm-up", OneOf(("constant", "linear", "cosine"))
    )
    warmup_steps: int = setting(0, "steps of linear rise to lr", NATURAL)
    min_lr_ratio: float = setting(0.0, "where linear and cosine end, as a share of lr", Between(0, 1))
    gradient_clipping: float = setting(1.0, "largest norm of the gradient", POSITIVE)
