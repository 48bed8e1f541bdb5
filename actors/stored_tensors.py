"""A safetensors file of a checkpoint, read with suspicion: nothing is taken from it before it is seen to fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.errors import CheckpointError

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
