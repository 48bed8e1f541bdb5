"""Reads the settings that a run wrote down (config.yaml), for those who know the run by its files."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from launcher.base.durable import replace_file
from launcher.base.errors import StorageError
from launcher.base.yaml_text import dump_yaml, load_yaml
from launcher.config.data import FURTHER, FurtherConfig, HeldOutConfig
from launcher.config.retired import without_retired
from launcher.config.schema import RunConfig

Section = TypeVar("Section")
OF_AN_ATTEMPT = re.compile(r"config\.attempt(\d+)\.yaml")


def read_settings(file: Path) -> Mapping[str, object]:
    """By sections; empty where there are none that can be read."""
    try:
        loaded = load_yaml(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_config(file: Path) -> RunConfig:
    """All settings as a run wrote them, for its further attempts: a preset may have been edited since.

    Raises StorageError.
    """
    try:
        values = load_yaml(file.read_bytes())
        without_retired(values)  # a file of an earlier version has them
        return _filled(RunConfig, values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StorageError(
            f"{file}, the settings of this run, can't be read: {why}", "look at the disk of cluster.fileroot"
        ) from error


def write_settings(config: RunConfig, file: Path) -> None:
    """For `read_config`. Raises StorageError."""
    try:
        replace_file(file, settings_text(dataclasses.asdict(config)).encode())
    except OSError as error:
        raise StorageError(f"{file} can't be written: {error.strerror or error}", "make room on its disk") from error


def settings_text(settings: dict[str, object]) -> str:
    return dump_yaml(settings)


def _filled(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """Of a section, its sections too. One that lacks a setting, or has one more, was not written by this program."""
    hints = typing.get_type_hints(kind)
    kinds = {one.name: hints[one.name] for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if missing := sorted(kinds.keys() - values.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
    made = {name: _value(name, kinds.get(name), value) for name, value in values.items()}
    return kind(**made)


def _value(name: str, kind: Any, value: Any) -> Any:
    if name in FURTHER:
        return {one: _filled(FurtherConfig, given) for one, given in value.items()}
    if name == "valid_dataset":
        return None if value is None else _filled(HeldOutConfig, value)
    is_section = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    return _filled(kind, value) if is_section else value


def foreign_trainer(settings: Mapping[str, object]) -> str:
    """Of another project's trainer: whose checkpoints those of the run are, as text; "" of the launcher's own."""
    adapter = setting_of(settings, "trainer.adapter")
    pattern = setting_of(settings, "trainer.checkpoints") or setting_of(settings, "trainer.config")
    return "" if adapter in (None, "own") else f"those of trainer.adapter={adapter}: {pattern or 'none'}"


def settings_of_attempts(config: Path) -> dict[int, Path]:
    """The files of attempts whose settings were not those of `config`, by the attempt's number."""
    named = ((OF_AN_ATTEMPT.fullmatch(file.name), file) for file in sorted(config.parent.glob("config.attempt*.yaml")))
    return {int(match[1]): file for match, file in named if match}


def setting_of(settings: Mapping[str, object], key: str) -> object:
    """By its dotted key; None where it is not there."""
    found: object = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
