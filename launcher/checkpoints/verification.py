"""Verifies every file of a checkpoint folder, ours or another program's export, as far as possible without torch.

    every file in its length, with its hash ─► headers possible, shapes as config.json says, numbers finite ─►
    optimizer, random states, data position there and of this step ─► loads

Nothing is changed, nothing is executed, and no more than some megabytes are in memory at a time. Every problem is
reported with its file; what could not be checked is `unknown`, and a folder with unknowns is not verified.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base.errors import LauncherError
from launcher.base.wording import some_of
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.manifest import (
    ADAPTER_FILE,
    FACTS_FILE,
    MANIFEST_NAME,
    MASTER,
    MOMENTS,
    POSITION_FILE,
    RANDOM_STATE,
    STATE_FORMAT,
    TENSORS_FILE,
    WEIGHTS_FILE,
    Manifest,
    find_faults,
    learned_name,
    list_files,
)
from launcher.checkpoints.model_files import INDEX, LAST_WRITTEN, find_shards, read_json, read_shape
from launcher.checkpoints.model_shape import MODEL_TYPES, ModelShape
from launcher.checkpoints.tensor_files import TensorEntry, can_judge, constant_matrices, nonfinite, read_entries
from launcher.checkpoints.weight_distances import odd_tensors

NO_MOMENTS = (MASTER, "random.")
"""How the tensors begin that are not the optimizer's."""
MOST_NAMED = 3
"""Tensors named of one kind of fault; a model of another size has hundreds."""

Entries = Mapping[str, TensorEntry]
_names = functools.partial(some_of, most=MOST_NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which run a checkpoint must be of: as its manifest's fingerprint has it."""

    experiment_name: str
    trial_name: str


@dataclass(slots=True)
class Verification:
    """What was found. `is_complete` only where nothing is wrong and nothing stayed unknown. `checked`: what was looked
    at, in a word each. Whether the model answers as it should is not: `scripts.compare_checkpoints` asks it."""

    folder: Path
    has_manifest: bool = False
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.problems and not self.unknown

    @property
    def why_not(self) -> str:
        return "; ".join([*self.problems, *self.unknown])


def verify(folder: Path, *, name: CheckpointName | None = None, identity: Identity | None = None) -> Verification:
    """Look at everything in `folder`. `name`: the step that it must be of, where its own name does not say.

    Never raises for what is on the disk.
    """
    report = Verification(folder)
    _try(report, lambda: _verify(report, name or CheckpointName.parse(folder.name), identity))
    if report.problems and report.has_manifest and not folder.is_dir():
        report.problems = [f"{folder} was moved or removed while it was read"]  # by a live run: it was not damaged
    return report


def _try(report: Verification, look: Callable[[], object]) -> bool:
    """Did the look end? What it raised is a problem."""
    try:
        look()
    except LauncherError as error:
        report.problems.append(error.message)
    except OSError as error:
        report.problems.append(f"{error.filename or report.folder} can't be read: {error.strerror or error}")
    else:
        return True
    return False


def _verify(report: Verification, name: CheckpointName | None, identity: Identity | None) -> None:
    folder = report.folder
    if not folder.is_dir():
        report.problems.append(f"{folder} is no folder")
        return
    if not any(folder.iterdir()):
        report.problems.append(f"{folder} is empty")
        return
    report.has_manifest = (folder / MANIFEST_NAME).exists()
    if report.has_manifest:
        manifest = Manifest.read(folder)
        _check_identity(report, manifest, name, identity)
        if not _check_files(report, manifest):
            return  # what is inside a damaged file says nothing more
        report.checked.append("bytes")
        parameters = _check_model(report, has_changed=functools.partial(_has_changed, report.folder))
        _try(report, lambda: _check_state(report, manifest, parameters))
    else:
        _check_export(report)
        _check_model(report, has_changed=lambda matrix: True)


def compare_with_neighbours(report: Verification, neighbours: Mapping[int, Path], *, global_step: int) -> None:
    """Is a matrix far from the same of both neighbours, which are close to each other? `neighbours`: two, by step;
    `global_step`: its own."""
    steps = " and ".join(str(step) for step in sorted(neighbours))
    is_between = min(neighbours) < global_step < max(neighbours)
    odd: list[str] = []
    if not _try(
        report, lambda: odd.extend(odd_tensors(report.folder, list(neighbours.values()), is_between=is_between))
    ):
        return
    report.checked.append(f"near steps {steps}")
    if odd:
        report.unknown.append(
            f"{report.folder}: {_names(odd)} {'is' if len(odd) == 1 else 'are'} far from steps {steps}, "
            "which are close to each other: something else than training changed it"
        )


# ── files ──


def _check_identity(
    report: Verification, manifest: Manifest, name: CheckpointName | None, identity: Identity | None
) -> None:
    file = report.folder / MANIFEST_NAME
    if name is not None and manifest.global_step != name.global_step:
        report.problems.append(f"{file} is of step {manifest.global_step}, the folder of step {name.global_step}")
    if identity is None:
        return
    for key, mine in asdict(identity).items():
        made_by = manifest.config_fingerprint.get(key)
        if made_by not in (None, mine):
            report.problems.append(f"{file} is of another run: its {key} is {made_by!r}, not {mine!r}")


def _check_files(report: Verification, manifest: Manifest) -> bool:
    report.problems += [fault.text for fault in find_faults(report.folder, manifest.files)]
    extra = {path.relative_to(report.folder).as_posix() for path in list_files(report.folder)} - manifest.files.keys()
    if extra:
        report.notes.append(f"files that the manifest does not list: {', '.join(sorted(extra))}")
    for name in (WEIGHTS_FILE, FACTS_FILE, TENSORS_FILE, POSITION_FILE):
        if name not in manifest.files:
            report.problems.append(f"{report.folder / name} is not among the files of its manifest")
    return not report.problems


def _check_export(report: Verification) -> None:
    """A Hugging Face folder that was written file by file, by somebody who vouches for nothing."""
    if ours := [name for name in (FACTS_FILE, TENSORS_FILE, POSITION_FILE) if (report.folder / name).exists()]:
        report.problems.append(f"{report.folder} has no {MANIFEST_NAME}, and {', '.join(ours)}: a checkpoint cut short")
    report.notes.append("no manifest: nothing vouches for its content, and it holds no optimizer and no data position")
    for name in (LAST_WRITTEN, "tokenizer.json"):
        file = report.folder / name
        if not file.is_file():
            report.problems.append(f"{file} is missing: the export was cut short, or this is no model folder")
        else:
            _try(report, functools.partial(read_json, file))


# ── tensors ──


def _check_model(report: Verification, *, has_changed: Callable[[str], bool]) -> dict[str, tuple[int, ...]]:
    """The parameters by name with their shapes, where config.json says them. `has_changed`: may training have changed
    the matrix of this name?"""
    found: dict[str, TensorEntry] = {}

    def look() -> None:
        for file in find_shards(report.folder):
            entries = _check_tensor_file(report, file)
            report.problems += [f"{file} holds {name} a second time" for name in sorted(entries.keys() & found.keys())]
            constant = constant_matrices(file, entries)
            as_given = {name: zero for name, zero in constant.items() if not has_changed(name)}
            report.problems += _constants(file, {name: constant[name] for name in constant.keys() - as_given.keys()})
            report.notes += [f"{what}; no gradient of them is stored" for what in _constants(file, as_given)]
            found.update(entries)
        _check_index(report, found)

    if not _try(report, look):
        return {}
    config = read_json(report.folder / "config.json")
    if config.get("model_type") not in MODEL_TYPES:
        report.unknown.append(f"unknown architecture {config.get('model_type')!r}: shapes were not checked")
        return {}
    shape = read_shape(report.folder)
    expected = shape.tensors()
    _check_shapes(report, found, expected, shape)
    report.checked += ["shapes", "numbers"]
    return expected


def _check_tensor_file(report: Verification, file: Path) -> Entries:
    entries = read_entries(file)
    if strange := sorted({entry.dtype for entry in entries.values() if not can_judge(entry.dtype)}):
        report.unknown.append(f"{file} holds {', '.join(strange)}: not known which of these numbers are finite")
    if bad := nonfinite(file, entries):
        report.problems.append(f"{file} holds numbers that are not finite, in {_names(bad)}")
    return entries


def _constants(file: Path, constant: Mapping[str, bool]) -> Iterator[str]:
    for is_zero, what in ((True, "all zero"), (False, "one number throughout")):
        if names := sorted(name for name, zero in constant.items() if zero is is_zero):
            yield f"{file} holds matrices that are {what}: {_names(names)}"


def _has_changed(folder: Path, matrix: str) -> bool:
    """Did a gradient reach it, as far as the optimizer's state shows? Else the run's first model had these numbers.

    An adapter's gradients count as those of its matrix. Raises ModelError, OSError.
    """
    steps, file = read_json(folder / FACTS_FILE).get("optimizer_steps"), folder / TENSORS_FILE
    of_it = tuple(f".{name}" for name in steps or () if name.startswith(matrix.removesuffix("weight")))
    kept = {
        name: entry
        for name, entry in read_entries(file).items()
        if name.endswith(of_it) and not name.startswith(MASTER) and len(entry.shape) >= 2
    }
    return len(constant_matrices(file, kept)) < len(kept)  # moments begin as one number, nearly always 0


def _check_index(report: Verification, found: Entries) -> None:
    index = report.folder / INDEX
    if index.is_file():
        listed = set(read_json(index).get("weight_map", {}))
        if missing := sorted(listed - found.keys()):
            report.problems.append(f"{index} names tensors that no file holds: {_names(missing)}")


def _check_shapes(
    report: Verification, found: Entries, expected: Mapping[str, tuple[int, ...]], shape: ModelShape
) -> None:
    where = f"{report.folder / 'config.json'}'s model"
    if missing := sorted(expected.keys() - found.keys()):
        report.problems.append(f"{report.folder} lacks tensors of {where}: {_names(missing)}")
    strange = sorted(name for name in found.keys() - expected.keys() if not shape.may_hold(name))
    if strange:
        report.problems.append(f"{report.folder} holds tensors that {where} has not: {_names(strange)}")
    for name in sorted(expected.keys() & found.keys()):
        if found[name].shape != expected[name]:
            report.problems.append(
                f"{report.folder}: {name} is {list(found[name].shape)}, {where} needs {list(expected[name])}"
            )


# ── the state of the training ──


def _check_state(report: Verification, manifest: Manifest, parameters: Mapping[str, tuple[int, ...]]) -> None:
    facts = read_json(report.folder / FACTS_FILE)
    entries = _check_tensor_file(report, report.folder / TENSORS_FILE)
    report.problems += [f"{report.folder / FACTS_FILE}: {what}" for what in _facts_problems(facts, manifest, entries)]
    learning = _what_learns(report, parameters)
    report.problems += [f"{report.folder / TENSORS_FILE}: {what}" for what in _state_problems(facts, entries, learning)]
    position = read_json(report.folder / POSITION_FILE)
    report.problems += [f"{report.folder / POSITION_FILE}: {what}" for what in _position_problems(position, manifest)]


def _what_learns(report: Verification, parameters: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """By name, with shapes: the adapters where there are some (actor.use_lora), else all of the model."""
    path = report.folder / ADAPTER_FILE
    if not path.is_file():
        return parameters
    stored = _check_tensor_file(report, path)
    return {learned_name(name): entry.shape for name, entry in stored.items()}


def _facts_problems(facts: Mapping[str, Any], manifest: Manifest, entries: Entries) -> Iterator[str]:
    if facts.get("format") != STATE_FORMAT:
        yield f"format is {facts.get('format')!r}, not {STATE_FORMAT!r}"
    if facts.get("policy_version") != manifest.policy_version:
        yield f"policy_version is {facts.get('policy_version')}, the manifest's {manifest.policy_version}"
    if facts.get("master_weights") not in (WEIGHTS_FILE, TENSORS_FILE):
        yield f"master_weights is {facts.get('master_weights')!r}"
    if not isinstance(facts.get("optimizer_steps"), dict):
        yield "it does not say which parameters the optimizer has stepped"
    elif unknown := sorted(entries.keys() - _moments_of(facts) - {n for n in entries if n.startswith(NO_MOMENTS)}):
        # no step at all is fine: a batch of equal rewards has no gradient, and AdamW keeps nothing before the first
        yield f"it knows nothing of {_names(unknown)} in {TENSORS_FILE}"
    try:
        version, internal, gauss = facts["python_random"]
        random.Random().setstate((version, tuple(internal), gauss))
        kind, keys, at, has_gauss, cached = facts["numpy_random"]
        np.random.RandomState().set_state((kind, np.array(keys, dtype=np.uint32), at, has_gauss, cached))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        yield f"random states: {error}"


def _moments_of(facts: Mapping[str, Any]) -> set[str]:
    """What the optimizer keeps, by the names that it has among the tensors."""
    parts = facts.get("optimizer_parts")
    if parts is None:
        parts = dict.fromkeys(facts["optimizer_steps"], MOMENTS)
    return {f"{part}.{name}" for name, of in parts.items() for part in of}


def _state_problems(
    facts: Mapping[str, Any], entries: Entries, parameters: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    if not isinstance(stepped := facts.get("optimizer_steps"), dict):
        return
    expected: dict[str, tuple[int, ...]] = {}
    for name in stepped:
        if parameters and name not in parameters:
            yield f"the optimizer stepped {name}, which the model has not"
        if "optimizer_parts" not in facts:
            expected |= {f"{moment}.{name}": parameters.get(name, ()) for moment in MOMENTS}
    if facts.get("master_weights") == TENSORS_FILE:
        expected |= {f"{MASTER}{name}": shape for name, shape in parameters.items()}
    if missing := sorted((expected.keys() | _moments_of(facts)) - entries.keys()):
        yield f"it lacks {_names(missing)}"
    for name in sorted(expected.keys() & entries.keys()):
        if (entries[name].dtype, entries[name].shape) != ("F32", expected[name]) and parameters:
            yield f"{name} is {entries[name].dtype} {list(entries[name].shape)}, not F32 {list(expected[name])}"
    torch_state = entries.get(RANDOM_STATE)
    if torch_state is None or torch_state.dtype != "U8" or torch_state.begin == torch_state.end:
        yield f"it lacks {RANDOM_STATE}"


def _position_problems(state: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    position, queue = state.get("position"), state.get("queue")
    if not isinstance(position, dict) or not isinstance(queue, dict):
        yield "it has no data position"
        return
    if position.get("next_step") != manifest.global_step + 1:
        yield f"its next step is {position.get('next_step')}, after step {manifest.global_step}"
    if missing := sorted({"format", "epoch", "cursor", "first", "last", "fingerprint"} - queue.keys()):
        yield f"its data position lacks {', '.join(missing)}"
