"""A safetensors file of a model: read with everything checked first, and written in place, by each rank its rows.

A tensor that is divided over several ranks lies in the file as a whole, row after row, so each rank's rows are one
stretch of it. Each rank knows the shapes of all tensors, so it knows where its rows go: nothing is gathered, and the
file is the same whatever the number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from launcher.base.errors import CheckpointError, TrainerError
from launcher.checkpoints.manifest import XXH3, WrittenPart

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}

BUFFER_BYTES = 64 * 2**20
"""Long enough that a copy takes far longer than its start, short beside a state."""

UNUSABLE = "this checkpoint can't be restored; choose an older one"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRows:
    """What this rank has of a tensor: its rows from `first_row` on. `shape`: of the whole. `is_whole`: all ranks have
    all of it. `dtype`: in which it is written; a piece is cast when its turn comes, so one at a time."""

    tensor: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int = 0
    is_whole: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Shares its memory. Raises TrainerError where it is divided otherwise than by rows."""
        if not isinstance(tensor, DTensor):
            return cls(tensor=tensor.detach(), dtype=tensor.dtype, shape=tuple(tensor.shape))
        (placement,) = tensor.placements
        local, shape = tensor.to_local().detach(), tuple(tensor.shape)
        if placement.is_replicate():
            return cls(tensor=local, dtype=tensor.dtype, shape=shape)
        if not placement.is_shard(0):
            raise TrainerError(
                f"a tensor {list(shape)} of the optimizer lies over the ranks as {placement}, and not by rows",
                "set actor.optimizer.type to another optimizer, or actor.dp_size=1",
            )
        _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor=local, dtype=tensor.dtype, shape=shape, first_row=begin[0], is_whole=False)

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def begin_byte(self) -> int:
        """Where it begins in the whole."""
        return self.first_row * math.prod(self.shape[1:]) * self.dtype.itemsize

    def copied(self) -> Self:
        """In the host's memory, and of its own."""
        return replace(self, tensor=self.tensor.to("cpu", copy=True))

    def cast(self, dtype: torch.dtype) -> Self:
        return replace(self, dtype=dtype)

    def as_bytes(self) -> Tensor:
        """Of these rows, where they are: the tensor's own memory where nothing is cast. [bytes], uint8"""
        return self.tensor.to(self.dtype).contiguous().reshape(-1).view(torch.uint8)


class DoubleBuffer:
    """Two parts of the host's memory, pinned where there is a GPU: one is filled by the GPU while the other is hashed
    and written, so a state costs the slower of both and not their sum."""

    def __init__(self, size: int = BUFFER_BYTES, *, is_pinned: bool = True) -> None:
        self._parts = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]

    def chunks(self, data: Tensor) -> Iterator[memoryview]:
        """`data` [bytes] in the host's memory, piece by piece. Each is valid until the next one is asked for."""
        pieces = torch.split(data, len(self._parts[0]))
        filling = self._fill(0, pieces[0])
        for index in range(len(pieces)):
            filled, done = filling
            if index + 1 < len(pieces):  # what lay in that part was written before this piece was asked for
                filling = self._fill((index + 1) % 2, pieces[index + 1])
            if done is not None:
                done.synchronize()
            yield filled.numpy().data

    def _fill(self, part: int, piece: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        filled = self._parts[part][: len(piece)]
        filled.copy_(piece, non_blocking=True)
        if piece.device.type != "cuda":
            return filled, None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()  # on this thread's stream, behind the copy
        return filled, done


class StoredTensors:
    """A safetensors file, open: what it claims is in its header, so a misfit is known before anything is read."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._names = set(file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def expect(self, name: str, shape: torch.Size | None = None) -> None:
        """Raises CheckpointError unless the tensor is there, in this shape, as float32; no shape: as bytes."""
        if name not in self._names:
            raise CheckpointError(f"{self._path} lacks {name}", UNUSABLE)
        stored = self._file.get_slice(name)
        wanted = ("U8", stored.get_shape()) if shape is None else ("F32", list(shape))
        if (stored.get_dtype(), stored.get_shape()) != wanted:
            raise CheckpointError(
                f"{self._path} holds {name} as {stored.get_dtype()} {stored.get_shape()}, and the model needs "
                f"{wanted[0]} {wanted[1]}",
                "it is of another model: actor.path must be the model that this checkpoint was trained from",
            )

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    @torch.no_grad()
    def read_into(self, target: Tensor, name: str) -> None:
        """Set this rank's part of `target` as it is stored."""
        piece = TensorRows.of(target)
        if piece.is_whole:
            piece.tensor.copy_(self.read(name))
        elif rows := len(piece.tensor):  # none where there are more ranks than rows
            piece.tensor.copy_(self._file.get_slice(name)[piece.first_row : piece.first_row + rows])


@contextmanager
def open_tensors(path: Path) -> Iterator[StoredTensors]:
    """Open a safetensors file. Raises CheckpointError naming it where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield StoredTensors(path, file)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}", UNUSABLE) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}", UNUSABLE) from error


def overwrite_tensors(
    path: Path,
    pieces: Mapping[str, TensorRows],
    *,
    rank: int = 0,
    notes: Mapping[str, str] | None = None,
    buffer: DoubleBuffer | None = None,
    is_durable: bool = False,
) -> WrittenPart:
    """Write a safetensors file over what `path` holds, without freeing its memory first. Raises OSError.

    Each rank calls it with the same names, in any order: it writes its own rows, the first one also the header and
    what all have. `buffer`: through which what lies on a GPU comes. `is_durable`: it is on the disk on return, but for
    the first rank's own, which is synced with the file.

    Not atomic: a manifest marks it as complete. safetensors' own writer copies each tensor and makes a new file,
    whose pages the kernel clears before they are written.
    """
    # the widest numbers first, so that all are aligned
    ordered = sorted(pieces.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    head = _header(ordered, notes)
    digest = xxhash.xxh3_128()
    stretches: list[tuple[int, int]] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for at, data in _own_part(ordered, head, rank, buffer):
            digest.update(data)
            _write_at(fd, data, at)
            begin = stretches.pop()[0] if stretches and stretches[-1][1] == at else at
            stretches.append((begin, at + len(data)))
        if rank == 0:
            os.ftruncate(fd, len(head) + sum(piece.whole_bytes for _, piece in ordered))
        elif is_durable:
            os.fsync(fd)  # the first rank's sync reaches nothing that the memory of another node holds back
    finally:
        os.close(fd)
    return WrittenPart(stretches=tuple(stretches), checksum=f"{XXH3}:{digest.hexdigest()}")


def _own_part(
    ordered: list[tuple[str, TensorRows]], head: bytes, rank: int, buffer: DoubleBuffer | None
) -> Iterator[tuple[int, memoryview]]:
    """What this rank writes, and where in the file, in the file's order."""
    if rank == 0:
        yield 0, memoryview(head)
    offset = len(head)
    for _, piece in ordered:
        if (rank == 0 or not piece.is_whole) and piece.tensor.numel():
            at = offset + piece.begin_byte
            for data in _host_chunks(piece.as_bytes(), buffer):
                yield at, data
                at += len(data)
        offset += piece.whole_bytes


def _host_chunks(data: Tensor, buffer: DoubleBuffer | None) -> Iterator[memoryview]:
    if buffer is None:
        yield data.cpu().numpy().data
    else:
        yield from buffer.chunks(data)


def _header(ordered: list[tuple[str, TensorRows]], notes: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {} if notes is None else {"__metadata__": dict(notes)}
    offset = 0
    for name, piece in ordered:
        end = offset + piece.whole_bytes
        entries[name] = {
            "dtype": DTYPES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
