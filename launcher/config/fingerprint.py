"""Compares the settings whose change makes a resume wrong with those in a checkpoint's manifest (docs/files.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
"""What each difference means for a resume; also the list of the settings, by their configuration keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that is not what it was when the checkpoint was made. None: it was not recorded."""

    key: str
    checkpoint: str | int | None
    config: str | int | None

    def __str__(self) -> str:
        meaning = MEANINGS.get(self.key, "unknown to this version")
        return f"{self.key} was {self.checkpoint!r}, is {self.config!r}: {meaning}"


def config_fingerprint(config: RunConfig) -> dict[str, str | int]:
    """The fingerprint of a configuration, keyed by configuration keys."""
    return {key: value_of(config, key) for key in MEANINGS}


def fingerprint_differences(checkpoint: Fingerprint, config: Fingerprint) -> tuple[Difference, ...]:
    """Where two fingerprints differ, in the order of MEANINGS; empty when a resume is right."""
    keys = [*MEANINGS, *sorted((checkpoint.keys() | config.keys()) - MEANINGS.keys())]
    return tuple(
        Difference(key=key, checkpoint=checkpoint.get(key), config=config.get(key))
        for key in keys
        if checkpoint.get(key) != config.get(key)
    )
