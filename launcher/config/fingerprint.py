"""Compares the settings whose change makes a resume wrong with those in a checkpoint's manifest (docs/files.md)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config.lora import MATRICES
from launcher.config.optimizer import ADAMW
from launcher.config.schema import RunConfig
from launcher.config.settings import value_of

Fingerprint = Mapping[str, str | int]

MEANINGS: Mapping[str, str] = {
    "experiment_name": "the checkpoint belongs to another experiment",
    "trial_name": "the checkpoint belongs to another trial",
    "train_dataset.batch_size": "the data position counts batches of another size: prompts would repeat or be left out",
    "gconfig.n_samples": "advantages are normalised within groups of another size",
    "cluster.n_nodes": "the saved state was split over another number of nodes",
    "actor.path": "the weights belong to another model",
}
SOMETIMES: Mapping[str, str] = {
    "actor.lora_rank": "the saved state is of adapters of another rank, or of a model without them",
    "actor.lora_alpha": "adapters would be multiplied by another number",
    "actor.target_modules": "other matrices have adapters",
    "actor.optimizer.type": "the saved moments are another optimizer's",
}
"""Recorded where actor.use_lora is true, and where the optimizer isn't adamw."""
CONTENT = "actor.path (content)"
"""What each difference means for a resume; also the list of the settings, by their configuration keys."""


OF_A_MODEL = ("*.safetensors", "config.json", "tokenizer.json")
LOOKED_AT = 2**20
"""Bytes at either end of a file: reading all of a large model would take minutes at each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that is not what it was when the checkpoint was made. None: it was not recorded."""

    key: str
    checkpoint: str | int | None
    config: str | int | None

    def __str__(self) -> str:
        meaning = {**MEANINGS, **SOMETIMES}.get(self.key.removesuffix(" (content)"), "unknown to this version")
        return f"{self.key} was {self.checkpoint!r}, is {self.config!r}: {meaning}"


def config_fingerprint(config: RunConfig) -> dict[str, str | int]:
    """The fingerprint of a configuration, keyed by configuration keys; and of the model's content, where it is here."""
    found: dict[str, str | int] = {key: value_of(config, key) for key in MEANINGS}
    actor = config.actor
    if actor.optimizer.type != ADAMW:
        found["actor.optimizer.type"] = actor.optimizer.type
    if actor.use_lora:
        found |= {"actor.lora_rank": actor.lora_rank, "actor.lora_alpha": str(actor.lora_alpha)}
        found["actor.target_modules"] = ",".join(sorted(actor.target_modules or MATRICES))
    if content := _content_of(Path(config.actor.path)):
        found[CONTENT] = content
    return found


def _content_of(folder: Path) -> str:
    """Of a model: the sizes, beginnings and ends of its files; "" if there are none. Raises OSError."""
    files = sorted(file for pattern in OF_A_MODEL for file in folder.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            digest.update(f"{file.name} {size} ".encode() + content.read(LOOKED_AT))
            content.seek(max(size - LOOKED_AT, 0))
            digest.update(content.read(LOOKED_AT))
    return digest.hexdigest() if files else ""


def fingerprint_differences(checkpoint: Fingerprint, config: Fingerprint) -> tuple[Difference, ...]:
    """Where two fingerprints differ, in the order of MEANINGS; empty when a resume is right.

    Models are compared by their content where both are known, so that a checkout may be moved.
    """
    keys = [*MEANINGS, *sorted((checkpoint.keys() | config.keys()) - MEANINGS.keys() - {CONTENT})]
    contents = (checkpoint.get(CONTENT), config.get(CONTENT))
    if None not in contents:
        keys.remove("actor.path")
        keys += [CONTENT] if contents[0] != contents[1] else []
    return tuple(
        Difference(key=key, checkpoint=checkpoint.get(key), config=config.get(key))
        for key in keys
        if checkpoint.get(key) != config.get(key)
    )
