"""New weights as SGLang's `flattened_bucket`: tensors one after another, as bytes, in one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from actors.serving.tensor_handles import in_memory_file

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
