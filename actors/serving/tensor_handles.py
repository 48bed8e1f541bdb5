"""A bucket of weights for SGLang's /update_weights_from_tensor: a handle of its bytes, and where each tensor is.

Same machine, same user. SGLang unpickles what it is sent, resolving names of torch and the standard library only.

- CPU: the bytes are an anonymous memory file (memfd) of this process, which the server maps. It is gone with the bucket
  or with this process, so nothing is left behind. torch's own way to share CPU tensors by name starts a daemon that
  outlives us.
- CUDA: torch's own IPC handle, as SGLang's `MultiprocessingSerializer` makes it. Not been run on a GPU.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from actors.serving.weight_buckets import WeightBucket


def in_memory_file(parts: Iterable[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """The bytes of uint8 tensors one after another as a uint8 tensor [bytes], whose memory another process of this user
    can map, and from which path; for as long as the tensor, or a view of it, is held."""
    descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:  # to write into mapped pages would take twice as long
            for part in parts:
                file.write(part.numpy().data)
            size = file.tell()
        os.truncate(descriptor, size or 1)  # nothing can't be mapped
        memory = mmap.mmap(descriptor, size or 1)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size], f"/proc/{os.getpid()}/fd/{descriptor}"


def handle_of(bucket: WeightBucket) -> str:
    """Base64 of what one rank of a server unpickles. One for each: torch counts who has opened a CUDA tensor, and its
    memory is used again when the last has let it go."""
    flat = _Mapped(bucket.file, bucket.flat.numel()) if bucket.file else bucket.flat
    buffer = io.BytesIO()
    what = {"flattened_tensor": flat, "metadata": list(_places(bucket))}
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(what)
    return base64.b64encode(buffer.getbuffer()).decode()


def _places(bucket: WeightBucket) -> Iterator[SimpleNamespace]:
    """As SGLang's FlattenedTensorMetadata, whose package takes ten seconds to import; `numel`: bytes, as there."""
    begin = 0
    for name, of, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, of)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=begin, end_idx=begin + size, numel=size)
        begin += size


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Unpickles as a uint8 tensor [size] that maps the file."""

    path: str
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(torch.from_file, self.path, shared=False, size=self.size, dtype=torch.uint8), ()
