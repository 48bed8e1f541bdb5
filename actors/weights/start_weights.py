"""Keeps the model folder that a server starts from until it has loaded it.

The trainer removes its folder when the next but one is published, and it removes checkpoints, or sets them aside where
it goes back to an older one. A server takes longer than that to start. A folder of hard links takes no room and keeps
the files.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.base.messages import PublishedWeights
from launcher.checkpoints.checkpoint_folder import Checkpoint
from launcher.checkpoints.manifest import FACTS_FILE, KEEP_MARK, MANIFEST_NAME, POSITION_FILE, TENSORS_FILE

NO_MODEL = frozenset({MANIFEST_NAME, KEEP_MARK, FACTS_FILE, TENSORS_FILE, POSITION_FILE})
"""Files of a checkpoint that no server reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWeights:
    """`lineage` None: not known to be the trainer's; they are replaced before the server gets traffic."""

    path: str
    version: int
    lineage: int | None


def keep_checkpoint(name: str, checkpoint: Checkpoint) -> StartWeights | None:
    """The weights of the checkpoint that the trainer will probably load, kept for this server until `release`.

    None where the checkpoint has been moved or removed meanwhile. A disk without hard links gives the folder itself.
    """
    if checkpoint.manifest is None:
        return None
    target = _start_folder(checkpoint.path.parent, name)
    path = target
    shutil.rmtree(target, ignore_errors=True)
    try:
        target.mkdir(mode=0o700)
        for file in checkpoint.path.iterdir():
            if file.is_file() and file.name not in NO_MODEL:
                os.link(file, target / file.name)
    except OSError:
        if not checkpoint.path.is_dir():
            return None
        shutil.rmtree(target, ignore_errors=True)
        path = checkpoint.path
    return StartWeights(path=str(path), version=checkpoint.manifest.policy_version, lineage=None)


def release(name: str, checkpoints: Path) -> None:
    """The server has started, or will not: what was kept of a checkpoint for it may go."""
    shutil.rmtree(_start_folder(checkpoints, name), ignore_errors=True)


def keep_for(name: str, weights: PublishedWeights) -> StartWeights | None:
    """Hard-link the folder under this server's name, replacing the one before; None where it is gone."""
    source = Path(weights.path)
    target = _folder(source.parent, name)
    shutil.rmtree(target, ignore_errors=True)
    try:
        target.mkdir(mode=0o700)
        for file in source.iterdir():
            os.link(file, target / file.name)
    except OSError:
        return None
    return StartWeights(path=str(target), version=weights.version, lineage=weights.lineage)


def forget(name: str, weights: PublishedWeights | None) -> None:
    if weights is not None:
        shutil.rmtree(_folder(Path(weights.path).parent, name), ignore_errors=True)


def _start_folder(checkpoints: Path, name: str) -> Path:
    return checkpoints / f".start-{name}"  # on the same disk, or nothing could be linked; no checkpoint's name


def _folder(root: Path, name: str) -> Path:
    return root.with_name(f"{root.name}.{name}")  # beside the trainer's, which a new trainer removes
