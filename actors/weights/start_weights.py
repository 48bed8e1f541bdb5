"""What a server starts from: a model folder of its own, that nobody removes while it loads.

The trainer's newest folder lives only until the next but one is published, and a server takes longer than that to
start. A folder of hard links costs no memory, and keeps the files.
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
    """`lineage` None: not known to be the trainer's own; they are replaced before traffic."""

    path: str
    version: int
    lineage: int | None


def first_weights(checkpoint: Checkpoint | None, model_path: str, lineage: int | None) -> StartWeights:
    """Those of the checkpoint that the trainer is about to load; the run's first, where it has none."""
    if checkpoint is None or checkpoint.manifest is None:
        return StartWeights(path=model_path, version=0, lineage=lineage)
    version = checkpoint.manifest.policy_version
    return StartWeights(path=str(checkpoint.path), version=version, lineage=lineage)


def keep_for(name: str, weights: PublishedWeights) -> StartWeights | None:
    """The same folder under a name of this server's own, in place of the one before; None where it has gone."""
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
