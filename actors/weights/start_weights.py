"""Keeps the model folder that a server starts from until it has loaded it.

The trainer removes its folder when the next but one is published, and a server takes longer than that to start. A
folder of hard links takes no memory and keeps the files.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.base.messages import PublishedWeights
from launcher.checkpoints.checkpoint_folder import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWeights:
    """`lineage` None: not known to be the trainer's; they are replaced before the server gets traffic."""

    path: str
    version: int
    lineage: int | None


def first_weights(checkpoint: Checkpoint | None, model_path: str, lineage: int | None) -> StartWeights:
    """The weights of the checkpoint that the trainer will load, or the run's first."""
    if checkpoint is None or checkpoint.manifest is None:
        return StartWeights(path=model_path, version=0, lineage=lineage)
    version = checkpoint.manifest.policy_version
    return StartWeights(path=str(checkpoint.path), version=version, lineage=lineage)


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


def _folder(root: Path, name: str) -> Path:
    return root.with_name(f"{root.name}.{name}")  # beside the trainer's, which a new trainer removes
