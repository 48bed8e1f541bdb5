"""Reads a safetensors file of a training state, checking everything first; or writes one, in place."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoints.manifest import XXH3, FileRecord

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}

UNUSABLE = "this checkpoint can't be restored; choose an older one"


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


def overwrite_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a safetensors file over what `path` holds, without freeing its memory first. Raises OSError.

    Not atomic: a manifest marks it as complete. safetensors' own writer copies each tensor and makes a new file,
    whose pages the kernel clears before they are written.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that all are aligned
    head = _header(ordered)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size, digest = 0, xxhash.xxh3_128()
        for part in (memoryview(head), *(_bytes_of(tensor) for _, tensor in ordered)):
            digest.update(part)
            _write_at(fd, part, size)
            size += len(part)
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    return FileRecord(bytes=size, checksum=f"{XXH3}:{digest.hexdigest()}")


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
