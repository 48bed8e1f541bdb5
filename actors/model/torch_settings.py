"""What the settings mean for torch: the dtype of each weight, the device, the threads, what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from launcher.base.errors import ConfigError, ResourceError
from launcher.config.schema import ActorConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a setting such as actor.dtype. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported", f"set actor.dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]


def own_dtype(actor: ActorConfig) -> torch.dtype:
    """Of the policy's own weights: what learns is float32, and so is what is sliced together with it."""
    return torch_dtype(actor.dtype) if actor.use_lora and actor.dp_size == 1 else torch.float32


def is_on_gpu(actor: ActorConfig) -> bool:
    return actor.device != "cpu" and torch.cuda.is_available()


def training_device(actor: ActorConfig) -> torch.device:
    """Where to train, with torch's threads set for it. Raises ResourceError."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML and the servers have it; asked below for the first time
    if actor.device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("actor.device=cuda, and torch finds no GPU here", "set actor.device=cpu or auto")
    device = torch.device("cuda" if is_on_gpu(actor) else "cpu")
    if device.type == "cpu" and actor.threads is not None:
        torch.set_num_threads(actor.threads)
    return device


@contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """What this thread copies from a GPU runs beside the kernels of other threads, behind those of before. Nothing on a
    CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            yield


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the layers' inputs and compute each layer again in the backward pass.

    Transformers does that only for layers in training mode. Only the layers' own flag is set, not that of what is in
    them, so dropout stays off.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
