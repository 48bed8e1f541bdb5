"""AReaL's recover folders: what its resume (1.0.4) loads, and whether that is valid. Nothing is unpickled.

Formats: six files written one after another into recover_info/, and one DCP folder that is overwritten in place. A
death in between mixes two steps, and neither file shows it: only their times do.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import ModelError
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.model_files import read_json

STEP_KEYS = ("epoch", "epoch_step", "global_step", "steps_per_epoch")
FREQUENCY_FILES = ("saver_info.json", "evaluator_info.json", "checkpoint_info.json")
FREQUENCY_KEYS = frozenset(
    {
        "frequence_seconds",  # so spelt by AReaL
        "frequency_steps",
        "start_time",
        "steps",
        "last_time",
        "last_steps",
        "interval_steps",
        "interval_seconds",
        "initial_value",
    }
)
DATA_FILE = "dataloader_info.pkl"
METADATA = ".metadata"
_SHARD = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverInfo:
    """`name`: the step that it says; None where it can't be read. `problems`: why AReaL's resume would fail, or lie.
    `has_optimizer`: else AReaL must be started with recover.no_load_optim=true.
    """

    folder: Path
    name: CheckpointName | None
    steps_per_epoch: int | None
    problems: tuple[str, ...]
    has_optimizer: bool


def read_recover_info(folder: Path, checkpoint: Path) -> RecoverInfo:
    """`checkpoint`: the DCP folder that goes with it."""
    problems: list[str] = []
    step = _object(folder / "step_info.json", problems)
    name = _name_of(step)
    if name is None and step:
        problems.append(f"{folder / 'step_info.json'} lacks the integers {', '.join(STEP_KEYS)}")
    elif name is not None and min(name.epoch, name.global_step) < 0:
        problems.append(f"{folder / 'step_info.json'} is of epoch {name.epoch}: no step was saved yet")
    for file in FREQUENCY_FILES:
        problems += _frequency_problems(folder / file)
    if "last_commit_step" not in _object(folder / "stats_logger_info.json", problems):
        problems.append(f"{folder / 'stats_logger_info.json'} has no last_commit_step")
    problems += pickle_problems(folder / DATA_FILE)
    problems += dcp_problems(checkpoint)
    problems += _mixture(folder / "step_info.json", checkpoint / METADATA)
    steps = step.get("steps_per_epoch")
    return RecoverInfo(
        folder=folder,
        name=name,
        steps_per_epoch=steps if isinstance(steps, int) else None,
        problems=tuple(problems),
        has_optimizer=_names_optimizer(checkpoint / METADATA),
    )


def _names_optimizer(metadata: Path) -> bool:
    """It contains the names of its tensors as plain text."""
    try:
        return b"dcp.optim" in metadata.read_bytes()
    except OSError:
        return False


def _name_of(step: Mapping[str, Any]) -> CheckpointName | None:
    if set(step) != set(STEP_KEYS) or not all(type(step[key]) is int for key in STEP_KEYS):
        return None
    return CheckpointName(epoch=step["epoch"], epoch_step=step["epoch_step"], global_step=step["global_step"])


def _frequency_problems(file: Path) -> list[str]:
    problems: list[str] = []
    content = _object(file, problems)
    for part in ("epoch", "step", "time"):
        inner = content.get(part)
        missing = sorted(FREQUENCY_KEYS - (inner.keys() if isinstance(inner, dict) else set()))
        if missing and not problems:
            problems.append(f"{file}: {part} lacks {', '.join(missing)}")
    return problems


def _object(file: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        return read_json(file)
    except ModelError as error:
        problems.append(error.message)
        return {}


def pickle_problems(file: Path) -> list[str]:
    """Is a pickle all there? Its opcodes are read, and not one of them is carried out."""
    try:
        for _ in pickletools.genops(file.read_bytes()):
            pass
    except OSError as error:
        return [f"{file} can't be read: {error.strerror}"]
    except Exception as error:  # noqa: BLE001 - pickletools raises whatever its decoders raise
        return [f"{file} is not a complete pickle: {error}"]
    return []


def dcp_problems(folder: Path) -> list[str]:
    """Is every shard there that the metadata names?"""
    if not folder.is_dir() or not any(folder.iterdir()):
        return [f"{folder} is {'empty' if folder.is_dir() else 'missing'}: AReaL has no model to recover from"]
    metadata = folder / METADATA
    if problems := pickle_problems(metadata):
        return problems
    named = set(_SHARD.findall(metadata.read_bytes().decode("latin-1")))
    problems = [
        f"{folder / name} is missing, and {METADATA} names it"
        for name in sorted(named)
        if not (folder / name).is_file()
    ]
    problems += [f"{file} is empty" for file in sorted(folder.glob("*.distcp")) if not file.stat().st_size]
    return problems if problems or named else [f"{metadata} names no shard"]


def _mixture(step_info: Path, metadata: Path) -> list[str]:
    """AReaL writes the checkpoint first and step_info.json after it."""
    try:
        later = metadata.stat().st_mtime - step_info.stat().st_mtime
    except OSError:
        return []
    if later <= 0:
        return []
    return [f"{metadata} was written {later:.1f} s after {step_info}: the weights may be of a later step than it says"]
