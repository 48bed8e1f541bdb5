"""A Hugging Face export written as the folder that AReaL recovers a model from (PyTorch's DCP), without an optimizer.

AReaL 1.0.4 loads `{"dcp": {"model": …}}` with torch.distributed.checkpoint, whatever number of ranks it has: the
names are the model's own, so a folder that one process wrote is split again when it is read. A tied head is there under
both of its names in what AReaL asks for, and in an export only under one.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.durable import sync_file, sync_folder
from launcher.base.errors import CheckpointError
from launcher.checkpoints.model_files import find_shards
from launcher.checkpoints.model_shape import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor

COMPARED_BYTES = 2**30
"""Read back at a time."""


def write_dcp(export: Path, folder: Path) -> int:
    """Write `folder`, which must not exist, and read it back; returns the number of tensors.

    Raises CheckpointError. torch is loaded here and nowhere else in the tools.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # nothing here needs a GPU, and the one there may be full
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = _read_export(export)
    try:
        folder.mkdir()
        save({"dcp": {"model": tensors}}, storage_writer=FileSystemWriter(folder), no_dist=True)
    except Exception as error:  # torch wraps what a full disk raises in kinds of its own
        raise CheckpointError(f"{folder} was not written: {error}", "is there room, may we write there?") from error
    for file in folder.iterdir():
        sync_file(file)
    sync_folder(folder)
    _compare(folder, tensors)
    return len(tensors)


def _read_export(export: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for shard in find_shards(export):
        tensors |= load_file(shard)
    if json.loads((export / "config.json").read_text()).get("tie_word_embeddings") and EMBEDDING in tensors:
        tensors.setdefault(HEAD, tensors[EMBEDDING])
    return tensors


def _compare(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    for names in _portions(tensors):
        read = {name: torch.empty_like(tensors[name]) for name in names}
        load({"dcp": {"model": read}}, storage_reader=FileSystemReader(folder), no_dist=True)
        for name in names:
            if not torch.equal(read[name], tensors[name]):
                raise CheckpointError(f"{folder}: {name} was not read back as it was written")


def _portions(tensors: Mapping[str, Tensor]) -> Iterator[Sequence[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        names.append(name)
        size += tensor.nbytes
        if size >= COMPARED_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
