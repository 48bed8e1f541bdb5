"""AReaL's recover folders: what its resume loads, and whether that is valid. Nothing is unpickled.

Formats: six files written one after another into recover_info/, and one DCP folder that is overwritten in place (0.3.1
to 0.3.4: a Hugging Face folder with an optimizer's file for each rank). A death in between mixes two steps. The
optimizer's own counter shows that, and the files' own whether they are of one step; times only where the counter can't
decide, since a copy changes them.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import CheckpointError, LauncherError, ModelError
from launcher.checkpoints.areal_optimizer import optimizer_steps
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.model_files import LAST_WRITTEN, find_shards, read_json
from launcher.checkpoints.tensor_files import read_entries
from launcher.run_files.written_settings import setting_of

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
SUPERVISED = "GRPO_SUPERVISED"
"""In the environment of a tool that a run's own supervisor starts, once the trainer has ended."""
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_RANK = re.compile(r"optim_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverInfo:
    """`name`: the step that it says; None where it can't be read. `problems`: why AReaL's resume would fail, or lie.
    `has_optimizer`: else AReaL must be started with recover.no_load_optim=true."""

    folder: Path
    name: CheckpointName | None
    steps_per_epoch: int | None
    problems: tuple[str, ...]
    has_optimizer: bool


def read_recover_info(folder: Path, checkpoint: Path, *, updates: int | None = None) -> RecoverInfo:
    """`checkpoint`: the DCP folder that goes with it. `updates`: optimizer steps in each step of the run, where that is
    known (actor.ppo_n_minibatches)."""
    problems: list[str] = []
    step = _object(folder / "step_info.json", problems)
    name = _name_of(step)
    if name is None and step:
        problems.append(f"{folder / 'step_info.json'} lacks the integers {', '.join(STEP_KEYS)}")
    elif name is not None and min(name.epoch, name.global_step) < 0:
        problems.append(f"{folder / 'step_info.json'} is of epoch {name.epoch}: no step was saved yet")
    for file in FREQUENCY_FILES:
        problems += _frequency_problems(folder / file)
    logger = _object(folder / "stats_logger_info.json", problems)
    if "last_commit_step" not in logger:
        problems.append(f"{folder / 'stats_logger_info.json'} has no last_commit_step")
    elif name is not None:
        problems += _other_step(folder, name.global_step, logger["last_commit_step"])
    problems += pickle_problems(folder / DATA_FILE)
    optimizer, last, counted = _optimizer_files(checkpoint), checkpoint / METADATA, None
    try:
        if optimizer and not last.exists():
            last = max(optimizer, key=_written_at)
            unreadable = export_problems(checkpoint) + _rank_problems(checkpoint, optimizer)
        elif not (unreadable := dcp_problems(checkpoint)):
            counted = optimizer_steps(checkpoint, last.read_bytes())
    except OSError as error:  # its trainer writes it again meanwhile, which removes .metadata for a moment
        unreadable = [f"{error.filename} can't be read: {error.strerror}"]
    problems += unreadable or _mixture(folder / "step_info.json", last, name, counted, updates)
    steps = step.get("steps_per_epoch")
    return RecoverInfo(
        folder=folder,
        name=name,
        steps_per_epoch=steps if isinstance(steps, int) else None,
        problems=tuple(problems),
        has_optimizer=bool(optimizer) or _names_optimizer(checkpoint / METADATA),
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


def _other_step(folder: Path, global_step: int, logged: object) -> list[str]:
    """The saver counts the steps that were done; the logger's last is the one before, or later where a step has several
    tables. Where neither is of this step, step_info.json was not written with them."""
    steps = setting_of(_object(folder / FREQUENCY_FILES[0], []), "step.steps")
    if logged == global_step - 1 or steps in (global_step + 1, None):
        return []
    return [
        f"{folder} mixes two steps: step_info.json says step {global_step}, but {FREQUENCY_FILES[0]} counts {steps} "
        f"steps, and stats_logger_info.json ends with step {logged}"
    ]


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


def _optimizer_files(checkpoint: Path) -> Sequence[Path]:
    return [file for file in sorted(checkpoint.glob("*.pt")) if _RANK.fullmatch(file.name)]


def _rank_problems(checkpoint: Path, files: Sequence[Path]) -> list[str]:
    """Is there an optimizer's file of every rank, of one number of ranks, and each to its end? (torch writes a zip.)"""
    found = [match for file in files if (match := _RANK.fullmatch(file.name))]
    worlds = {int(match["world"]) for match in found}
    if len(worlds) > 1:
        return [f"{checkpoint} has an optimizer of {' and of '.join(map(str, sorted(worlds)))} ranks"]
    missing = sorted(set(range(max(worlds))) - {int(match["rank"]) for match in found})
    problems = [f"{checkpoint} lacks the optimizer of rank {', '.join(map(str, missing))}"] if missing else []
    return problems + [f"{file} is cut short" for file in files if not zipfile.is_zipfile(file)]


def export_problems(folder: Path) -> list[str]:
    """Is a Hugging Face folder there to its end?"""
    try:
        check_export(folder)
    except LauncherError as error:
        return [error.message]
    return []


def check_export(folder: Path) -> None:
    """Raises CheckpointError, ModelError."""
    if (folder / METADATA).exists():
        raise CheckpointError(f"{folder} is a DCP folder, not a model")
    for name in ("config.json", LAST_WRITTEN):
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing: the export was cut short")
    for shard in find_shards(folder):
        read_entries(shard)


def _written_at(file: Path) -> float:
    return file.stat().st_mtime


def _mixture(
    step_info: Path, last: Path, name: CheckpointName | None, counted: int | None, updates: int | None
) -> list[str]:
    """AReaL writes the checkpoint first, `last` as its last file, and step_info.json after it. An optimizer has counted
    fewer steps than were done where it began afresh or left some out, and never more; None: not known."""
    done = 0 if name is None else name.global_step + 1
    if counted and done > 0:
        if updates and counted > updates * done:
            at = -(-counted // updates) - 1
            return [
                f"{last.parent} and {step_info} are of two steps: the optimizer has made {counted} steps, "
                f"{updates} a step (actor.ppo_n_minibatches), so its weights are of step {at} or later, and "
                f"step_info.json says {done - 1}"
            ]
        if counted == (updates or counted // done) * done:
            return []  # whatever the times say: a copy has changed them
    try:
        later = _written_at(last) - _written_at(step_info)
    except OSError:
        return []
    if later <= 0:
        return []
    return [
        f"{last} was written {later:.1f} s after {step_info}: the weights may be of a later step than it says"
        " (or a copy changed the times: cp -a keeps them)"
    ]
