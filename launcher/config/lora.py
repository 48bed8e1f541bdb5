"""The settings of LoRA: small adapters train, and the model's own weights stay (docs/recipes.md). Names are AReaL's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.settings import COUNT, POSITIVE, setting

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a layer's attention and MLP."""
FUSED = ("qkv_proj", "gate_up_proj")
"""In place of some of those, in Phi-3 and GLM-4."""

INSTALL_PEFT = 'pip install -c constraints.txt -e ".[lora]"'


@dataclass
class LoraConfig:
    """A part of `actor`."""

    use_lora: bool = setting(False, "train adapters of low rank (LoRA, by PEFT) instead of the model's own weights")
    lora_rank: int = setting(32, "rank of each adapter", COUNT)
    lora_alpha: float = setting(
        16.0, "scale of the adapters: the product of an adapter is multiplied by lora_alpha / lora_rank", POSITIVE
    )
    target_modules: list[str] = setting(
        [],
        "matrices that get an adapter, by the end of their names, e.g. [q_proj,v_proj]; empty: all matrices of a layer",
    )

    @property
    def adapted(self) -> tuple[str, ...]:
        return tuple(self.target_modules) or (*MATRICES, *FUSED)


def find_lora_problems(actor: LoraConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed."""
    if not actor.use_lora:
        for key in ("lora_rank", "lora_alpha", "target_modules"):
            if getattr(actor, key) != getattr(LoraConfig(), key):
                yield f"actor.{key}", "not given without actor.use_lora=true"
        return
    if unknown := [name for name in actor.target_modules if name not in (*MATRICES, *FUSED)]:
        yield "actor.target_modules", f"of {', '.join((*MATRICES, *FUSED))}; {', '.join(unknown)} can't have an adapter"
