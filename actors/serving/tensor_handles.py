"""Tensors for SGLang's /update_weights_from_tensor, as handles instead of values. Same machine, same user.

SGLang unpickles what it is sent, resolving names of torch and the standard library only.

- CPU: all tensors are copied into one anonymous memory file (memfd) of this process; the request holds their offsets,
  and the server maps the file. It is gone with the `with` block or with this process, so nothing is left behind.
  torch's own way to share CPU tensors by name starts a daemon that outlives us.
- CUDA: torch's own IPC handles, as SGLang's `MultiprocessingSerializer` makes them. Not been run on a GPU.

Measured, 0.43 M float32 parameters, two busy cores: 14 ms in the server and 3 ms here, against 36 + 4 ms by value and
20 + 3 ms through a folder in memory-backed storage.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

ALIGNMENT = 64  # bytes; more than any dtype needs


@contextmanager
def shared(named_tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What to send for `named_tensors`, valid inside the block: base64 of the pickled list of (name, handle)."""
    if any(tensor.is_cuda for tensor in named_tensors.values()):
        yield _encoded([(name, tensor.detach()) for name, tensor in named_tensors.items()])
        return
    offsets, size = _layout(named_tensors)
    descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            for name, tensor in named_tensors.items():
                _write(memory, offsets[name], tensor)
        file = _File(f"/proc/{os.getpid()}/fd/{descriptor}", size)
        yield _encoded([(name, _Handle(file, offsets[name], tensor)) for name, tensor in named_tensors.items()])
    finally:
        os.close(descriptor)


def _encoded(handles: list[tuple[str, Any]]) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(handles)
    return base64.b64encode(buffer.getbuffer()).decode()


def _layout(named_tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Where each tensor begins, in bytes, and the size of all."""
    offsets, end = {}, 0
    for name, tensor in named_tensors.items():
        offsets[name] = end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, 1)


def _write(memory: mmap.mmap, offset: int, tensor: torch.Tensor) -> None:
    if tensor.numel():
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        flat.view(tensor.shape).copy_(tensor.detach())


@dataclass(frozen=True, slots=True)
class _File:
    """Unpickles as the storage that maps it."""

    path: str
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.UntypedStorage.from_file, (self.path, False, self.size)


@dataclass(frozen=True, slots=True)
class _Typed:
    file: _File
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(torch.storage.TypedStorage, wrap_storage=self.file, dtype=self.dtype, _internal=True), ()


class _Handle:
    """Unpickles as a contiguous tensor of the same shape and dtype, at `offset` bytes into the file."""

    def __init__(self, file: _File, offset: int, tensor: torch.Tensor) -> None:
        self._typed = _Typed(file, tensor.dtype)
        self._place = (
            offset // tensor.element_size(),
            tuple(tensor.shape),
            torch.empty(tensor.shape, device="meta").stride(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor, (self._typed, *self._place)
