"""Reads the settings that a run wrote down (config.yaml), for those who know the run by its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml


def read_settings(file: Path) -> Mapping[str, object]:
    """By sections; empty where there are none that can be read."""
    try:
        loaded = yaml.safe_load(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def foreign_trainer(settings: Mapping[str, object]) -> str:
    """Of another project's trainer: whose checkpoints those of the run are, as text; "" of the launcher's own."""
    adapter = setting_of(settings, "trainer.adapter")
    pattern = setting_of(settings, "trainer.checkpoints") or setting_of(settings, "trainer.config")
    return "" if adapter in (None, "own") else f"those of trainer.adapter={adapter}: {pattern or 'none'}"


def setting_of(settings: Mapping[str, object], key: str) -> object:
    """By its dotted key; None where it is not there."""
    found: object = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
