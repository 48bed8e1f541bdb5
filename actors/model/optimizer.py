"""The optimizer over float32 master weights, AdamW or one by import path, and the course of its learning rate.

The learning rate is a function of the step alone: there is no scheduler whose state could differ from the counter
after a restore. What an optimizer keeps of a parameter goes by names, as plain tensors, so that a resume is bit for
bit. A tensor that is made of several, as an 8-bit moment, has a name for each: `exp_avg.codes`.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from actors.model.stored_tensors import DTYPES, TensorRows
from actors.model.training_state import SavedState
from launcher.base.errors import ConfigError, TrainerError
from launcher.config.optimizer import ADAMW, OptimizerConfig

STEP = "step"
OTHER = "set actor.optimizer.type to another optimizer"
LONGEST_REASON = 300


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Weight decay acts on matrices only: pulling norms and biases to zero does harm and no good. Raises ConfigError.

    Another class than AdamW gets what its signature has in the same form: Adafactor's `eps` is a pair, and stays.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed: dict[str, Any] = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay}
    spared: dict[str, Any] = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    settings: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.type == ADAMW:
        return AdamW([decayed, spared], **settings, fused=True)
    try:
        module, _, name = config.type.partition(":")
        made = getattr(importlib.import_module(module), name)
        if not (isinstance(made, type) and issubclass(made, Optimizer)):
            raise TypeError("it is no torch.optim.Optimizer")
        inspect.signature(made.step).bind(None)  # LBFGS's needs a closure, which is not given
        accepted = inspect.signature(made).parameters
        if "weight_decay" in accepted:
            settings["weight_decay"] = config.weight_decay
        else:
            decayed, spared = {"params": parameters}, {"params": []}
        taken = {key: value for key, value in settings.items() if _takes(accepted.get(key), value)}
        optimizer = made([group for group in (decayed, spared) if group["params"]], **taken)
        needs_sparse = _takes_a_step(made, taken, is_sparse=True) and not _takes_a_step(made, taken, is_sparse=False)
    except Exception as error:  # a user's module may raise anything
        what = f"actor.optimizer.type={config.type} can't be made: {type(error).__name__}: {error}"
        raise ConfigError(what, "set it to adamw, or to module:Class of an installed torch optimizer") from error
    if needs_sparse:
        raise ConfigError(
            f"actor.optimizer.type={config.type} needs sparse gradients, and a model's are dense",
            "set it to adamw, or to module:Class of an optimizer that takes dense gradients",
        )
    if divided := [parameter for parameter in parameters if isinstance(parameter, DTensor)]:
        _try_divided(max(divided, key=Tensor.numel), lambda parameter: made([parameter], **taken), config.type)
    return optimizer


def _try_divided(largest: Tensor, make: Callable[[nn.Parameter], Optimizer], kind: str) -> None:
    """A step on a tensor that lies over the ranks as `largest` does; some can't take one, or keep what no rank can
    write by itself. Tried when it is made: else each attempt would end at its first step. Raises ConfigError."""
    parameter = nn.Parameter(torch.zeros_like(largest))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make(parameter)
        optimizer.step()
        for part in parts_of(optimizer.state[parameter]).values():
            TensorRows.of(part)
    except Exception as error:
        said = error.message if isinstance(error, TrainerError) else " ".join(str(error).split())[:LONGEST_REASON]
        raise ConfigError(
            f"actor.optimizer.type={kind} can't be divided over ranks: {type(error).__name__}: {said}",
            "set it to adamw, or set actor.dp_size=1",
        ) from error


def _takes_a_step(made: type[Optimizer], settings: Mapping[str, Any], *, is_sparse: bool) -> bool:
    """Here, with a gradient of that kind. One that steps on a GPU only takes neither here: that refuses nothing."""
    gradient = torch.zeros(1, 1, device="cpu")
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.to_sparse() if is_sparse else gradient
    try:
        made([weight], **settings).step()
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return False
    return True


def _takes(accepted: inspect.Parameter | None, value: object) -> bool:
    if accepted is None or accepted.default is inspect.Parameter.empty:
        return accepted is not None
    return isinstance(value, tuple) == isinstance(accepted.default, tuple)


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


def parts_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of one parameter. They share memory with the optimizer, but for plain numbers. Raises TrainerError."""
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, DTensor) and hasattr(value.to_local(), "__tensor_flatten__"):
            kind = type(value.to_local()).__name__
            raise TrainerError(f"the optimizer keeps {name} as {kind}, which is not stored row by row", OTHER)
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__"):
            parts |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__tensor_flatten__()[0]}
        elif isinstance(value, int | float):
            parts[name] = torch.tensor(value, dtype=torch.float64)
        elif value is not None:
            parts[name] = value
    for name, value in parts.items():
        kind = getattr(value, "dtype", type(value).__name__)
        if kind not in DTYPES:
            raise TrainerError(f"the optimizer keeps {name}, of {kind}, which no checkpoint here holds", OTHER)
    return parts


@torch.no_grad()
def put_parts(state: dict[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Set them in a state of the same form."""
    for name, value in parts.items():
        outer, _, inner = name.partition(".")
        held = getattr(state[outer], inner) if inner else state[outer]
        if isinstance(held, Tensor):
            (held.to_local() if isinstance(held, DTensor) else held).copy_(value)
        else:
            state[outer] = type(held)(value.item())


@torch.no_grad()
def resume_state(optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: SavedState) -> None:
    """This rank's part of it as it was saved, in a new `optimizer`. It makes its state by a step without gradients, if
    it has not yet, which may change the weights: set those afterwards."""
    for name, parts in saved.facts.parts.items():
        if parts:  # of a parameter that no gradient has reached nothing is kept: a step would begin to count
            parameters[name].grad = torch.zeros_like(parameters[name])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for name, parts in saved.facts.parts.items():
        state = optimizer.state[parameters[name]]
        held = parts_of(state)
        for part in parts:
            saved.put_part(held[part], part, name)
            if part in state and not isinstance(state[part], Tensor):
                state[part] = type(state[part])(held[part].item())


def step_at(optimizer: Optimizer, learning_rate: float) -> None:
    """Raises TrainerError where it keeps more than its parameters' states, which is all that a checkpoint has."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.step()
    if before != optimizer.param_groups:
        kind = type(optimizer).__name__
        raise TrainerError(
            f"{kind} changes figures beside its parameters' state, which no checkpoint here holds", OTHER
        )
