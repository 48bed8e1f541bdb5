"""New weights as SGLang's `flattened_bucket`: tensors one after another, as bytes, in one flat tensor; and a handle of
it for /update_weights_from_tensor, with where each tensor is.

A handle is for the same machine and the same user. SGLang unpickles what it is sent, resolving names of torch and the
standard library only.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

BUCKET_BYTES = 2**30
"""A server takes so much memory for a bucket that it receives over a group, twice, until it has loaded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """`names`, `dtypes` and `shapes` in the order of `flat`, a uint8 tensor [bytes] that shares no memory with them.

    `file`: from where another process of this user can map `flat`; "" on a GPU.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: torch.Tensor
    file: str


def in_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], *, device: str | None = None, most_bytes: int = BUCKET_BYTES
) -> list[WeightBucket]:
    """Copies of all weights on `device`, or where they are; each bucket of `most_bytes` or one tensor, of one dtype, so
    that each tensor begins at a multiple of its dtype's size.

    Beside the copies, one bucket's tensors are held at a time: `weights` may make each when it is asked for.
    """
    return list(map(partial(_bucket, device=device), _parts(weights, most_bytes)))


def _parts(weights: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if part and (size + tensor.nbytes > most_bytes or tensor.dtype != next(iter(part.values())).dtype):
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _bucket(part: Mapping[str, torch.Tensor], *, device: str | None) -> WeightBucket:
    bytes_of = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in part.values()]
    where = torch.device(device or bytes_of[0].device)
    if where.type == "cpu":
        flat, file = in_memory_file(one.cpu() for one in bytes_of)
    else:
        flat, file = torch.empty(sum(one.numel() for one in bytes_of), dtype=torch.uint8, device=where), ""
        begin = 0
        for one in bytes_of:
            flat[begin : begin + one.numel()].copy_(one)
            begin += one.numel()
    return WeightBucket(
        names=tuple(part),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in part.values()),
        shapes=tuple(tuple(tensor.shape) for tensor in part.values()),
        flat=flat,
        file=file,
    )


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
