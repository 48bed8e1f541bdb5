"""New weights as SGLang's `flattened_bucket`: tensors one after another, as bytes, in one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

BUCKET_BYTES = 2**30
"""A server takes so much memory for a bucket, twice, until it has loaded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """`names`, `dtypes` and `shapes` in the order of `flat`, a uint8 tensor [bytes] that shares no memory with them."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: torch.Tensor


def in_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], *, device: str, most_bytes: int = BUCKET_BYTES
) -> list[WeightBucket]:
    """Copies of all weights on `device`, each bucket of `most_bytes` or one tensor.

    Beside the copies, one bucket's tensors are held at a time: `weights` may make each when it is asked for.
    """
    return list(map(partial(_bucket, device=device), _parts(weights, most_bytes)))


def _parts(weights: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > most_bytes:
            yield part
            part = {}
        part[name] = tensor
    if part:
        yield part


def _bucket(part: Mapping[str, torch.Tensor], *, device: str) -> WeightBucket:
    flat = torch.empty(sum(tensor.nbytes for tensor in part.values()), dtype=torch.uint8, device=device)
    begin = 0
    for tensor in part.values():
        flat[begin : begin + tensor.nbytes].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        begin += tensor.nbytes
    return WeightBucket(
        names=tuple(part),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in part.values()),
        shapes=tuple(tuple(tensor.shape) for tensor in part.values()),
        flat=flat,
    )
