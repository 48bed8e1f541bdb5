"""What a disk gives of the checkpoints of another project's trainer, and how one is set aside on it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from launcher.adapters.trainer_adapter import FoundCheckpoint
from launcher.base.errors import DiskError, ModelError
from launcher.checkpoints.checkpoint_folder import why_unread
from launcher.checkpoints.tensor_files import read_entries

DISK_HINT = (
    "look at its disk: the same command resumes when it is back; to begin anew without them give another trial_name"
)


def damage_in(path: Path) -> str:
    """Why the safetensors files of a checkpoint can't be loaded; "" where they can, or there are none. No other format
    is read: pickled files would be executed. Raises DiskError where its disk does not give it."""
    for file in sorted(path.rglob("*.safetensors")):
        try:
            read_entries(file)
        except ModelError as error:
            if isinstance(error.__cause__, OSError):
                raise DiskError(error.message, DISK_HINT) from error
            return error.message
    return ""


def unread_in(found: Sequence[FoundCheckpoint]) -> str:
    """Why the disk does not give a file of theirs; "" where it gives all."""
    with contextlib.suppress(FileNotFoundError):  # some file has just been removed
        files = (file for one in found for file in (one.path, *one.path.rglob("*")) if file.is_file())
        return next(filter(None, map(why_unread, files)), "")
    return ""


def set_aside(path: Path, why: str, folder: Path) -> tuple[Path, Path]:
    """Move it; returns its path and the new one. Raises OSError."""
    folder.mkdir(exist_ok=True)
    number = 1
    while (target := folder / f"{path.name}.{why}-{number}").exists():
        number += 1
    path.rename(target)
    return path, target
