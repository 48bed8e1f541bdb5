"""LoRA by PEFT: adapters of low rank beside a model's matrices, which train while the model's own weights stay.

    W x  ─►  W x + (lora_alpha / lora_rank) B A x        A: [rank, in], B: [out, rank], B = 0 at first

Hu et al. 2021, "LoRA", section 4.1. Servers get the sum of both as W, and know nothing of adapters:
serving the adapters themselves costs SGLang more for each token than the smaller publish saves (measured on a CPU).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.model.model_folder import named_weights
from launcher.base.errors import ConfigError
from launcher.checkpoints.manifest import ADAPTER, ADAPTER_FILE
from launcher.config.lora import INSTALL_PEFT
from launcher.config.schema import ActorConfig

FIRST_WEIGHTS_SEED = 1
"""Of A, so that every beginning is the same."""
BASE, FACTORS = ".base_layer.", (f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.")


def add_adapters(model: PreTrainedModel, actor: ActorConfig) -> None:
    """Give `model` its adapters, in float32, and let nothing else of it learn. Raises ConfigError: no PEFT is here."""
    peft = _peft()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(FIRST_WEIGHTS_SEED)
        peft.inject_adapter_in_model(_config(actor, peft), model, ADAPTER)
    for name, parameter in model.named_parameters():
        if _is_factor(name):
            parameter.data = parameter.data.float()  # PEFT makes them of the model's dtype


def merged_weights(
    model: PreTrainedModel, actor: ActorConfig, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights that act as model and adapters do, by the names that they have in a model without any.

    Where there is an adapter, a new float32 tensor; else the model's own. `whole` joins the slices of several ranks.
    """
    factors = {name: tensor.detach() for name, tensor in named_weights(model) if _is_factor(name)}
    scale = actor.lora_alpha / actor.lora_rank
    for name, tensor in named_weights(model):
        if _is_factor(name):
            continue
        plain, weight = name.replace(BASE, "."), whole(tensor.detach())
        module = name.removesuffix(f"{BASE}weight")
        if module != name:
            a, b = (whole(factors[f"{module}{factor}weight"]) for factor in FACTORS)
            weight = weight.float() + scale * (b @ a)
        yield plain, weight


def write_adapter_config(checkpoint: Path, actor: ActorConfig) -> None:
    """What PEFT's `from_pretrained` reads beside the adapters, in their folder. Raises OSError."""
    folder = (checkpoint / ADAPTER_FILE).parent
    folder.mkdir(exist_ok=True)
    config = _config(actor, _peft())
    config.base_model_name_or_path = actor.path
    config.save_pretrained(folder)


def _is_factor(name: str) -> bool:
    return any(factor in name for factor in FACTORS)


def _config(actor: ActorConfig, peft: Any) -> Any:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=actor.lora_rank,
        lora_alpha=actor.lora_alpha,
        target_modules=list(actor.adapted),
        lora_dropout=0.0,
        inference_mode=False,
    )


def _peft() -> Any:
    try:
        return importlib.import_module("peft")  # takes seconds, which only who uses it should wait for
    except ImportError as error:
        raise ConfigError(f"actor.use_lora=true needs PEFT: {error}", INSTALL_PEFT) from error
