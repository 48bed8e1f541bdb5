"""Saves and loads what a model folder lacks for an exact resume: optimizer moments, random states, master weights.

Two files beside the model, and nothing in them is executed when they are read:
`training_state.json` (counters, states of Python's and NumPy's generators) and `training_state.tensors`, which is a
safetensors file under another suffix: SGLang loads every `*.safetensors` of a folder as weights of the model.
A read checks everything against the model first and changes nothing before all of it fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.model.stored_tensors import UNUSABLE, StoredTensors, open_tensors, overwrite_tensors
from launcher.base.errors import CheckpointError
from launcher.checkpoints.manifest import (
    FACTS_FILE,
    MASTER,
    MOMENTS,
    RANDOM_STATE,
    STATE_FORMAT,
    TENSORS_FILE,
    WEIGHTS_FILE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The content of training_state.json. `optimizer_steps`: how often each parameter was stepped, by its name.
    `optimizer_parts`: what another one than AdamW keeps of each (actors/model/optimizer.py); None of AdamW."""

    policy_version: int
    master_weights: str  # the file that holds the float32 weights
    optimizer_steps: Mapping[str, int]
    optimizer_parts: Mapping[str, Sequence[str]] | None
    python_random: tuple[Any, ...]
    numpy_random: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedState:
    """What training has made of a model, by the names of its parameters. `steps`: how often each was stepped."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, int]
    is_adamw: bool = True


TrainingState = tuple[Mapping[str, object], Mapping[str, Tensor]]
"""The content of both files, every float32 weight among the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReader:
    """A saved state, tensor by tensor: `weight(name)`, `moment(moment, name)`. Either raises CheckpointError."""

    steps: Mapping[str, int]
    parts: Mapping[str, Sequence[str]]
    weight: Callable[[str], Tensor]
    moment: Callable[[str, str], Tensor]


def collect_training_state(learned: LearnedState, *, policy_version: int) -> TrainingState:
    """The content of both files. The tensors are those of `learned`, and random states."""
    tensors = {f"{moment}.{name}": tensor for name, m in learned.moments.items() for moment, tensor in m.items()}
    tensors |= {f"{MASTER}{name}": weight for name, weight in learned.weights.items()}
    facts: dict[str, object] = {
        "format": STATE_FORMAT,
        "policy_version": policy_version,
        "master_weights": TENSORS_FILE,
        "optimizer_steps": dict(learned.steps),
        **({} if learned.is_adamw else {"optimizer_parts": {name: [*m] for name, m in learned.moments.items()}}),
        "python_random": random.getstate(),
        "numpy_random": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }
    return facts, tensors | _torch_random()


def master_weights(state: TrainingState) -> dict[str, Tensor]:
    """The float32 weights in a state, by parameter."""
    return {name.removeprefix(MASTER): tensor for name, tensor in state[1].items() if name.startswith(MASTER)}


def save_training_state(folder: Path, state: TrainingState, *, has_masters: bool) -> None:
    """Write both files. `has_masters`: the model's own file has the float32 weights, so ours leaves them out.

    Raises OSError.
    """
    facts, tensors = state
    if has_masters:
        facts = {**facts, "master_weights": WEIGHTS_FILE}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(MASTER)}
    (folder / FACTS_FILE).write_text(json.dumps(facts))
    overwrite_tensors(folder / TENSORS_FILE, tensors)
    (folder / TENSORS_FILE).chmod((folder / FACTS_FILE).stat().st_mode)


def read_facts(folder: Path) -> TrainingFacts:
    """training_state.json of `folder`. Raises CheckpointError naming the file."""
    path = folder / FACTS_FILE
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != STATE_FORMAT:
            raise CheckpointError(
                f"{path} has format {stored['format']!r}, and {STATE_FORMAT!r} is what we read", UNUSABLE
            )
        if stored["master_weights"] not in (WEIGHTS_FILE, TENSORS_FILE):
            raise ValueError(f"master_weights is {stored['master_weights']!r}")
        version, internal, gauss = stored["python_random"]
        name, keys, position, has_gauss, cached = stored["numpy_random"]
        facts = TrainingFacts(
            policy_version=int(stored["policy_version"]),
            master_weights=str(stored["master_weights"]),
            optimizer_steps={str(name): int(step) for name, step in stored["optimizer_steps"].items()},
            optimizer_parts={str(name): list(map(str, of)) for name, of in stored["optimizer_parts"].items()}
            if "optimizer_parts" in stored
            else None,
            python_random=(version, tuple(internal), gauss),
            numpy_random=(name, np.array(keys, dtype=np.uint32), position, has_gauss, cached),
        )
        random.Random().setstate(facts.python_random)  # on trial: a bad state must show before anything is changed
        np.random.RandomState().set_state(facts.numpy_random)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}", UNUSABLE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}", UNUSABLE) from error
    return facts


def load_training_state(
    folder: Path,
    *,
    facts: TrainingFacts,
    shapes: Mapping[str, torch.Size],
    put: Callable[[StateReader], None],
    is_adamw: bool = True,
) -> None:
    """Have `put` set weights and moments as they were saved, and set the generators. `shapes`: of the parameters.

    Raises CheckpointError where anything misfits, with all as it was before.
    """
    if is_adamw != (facts.optimizer_parts is None):
        what = f"{folder / FACTS_FILE} is of another optimizer"
        raise CheckpointError(what, "set actor.optimizer.type as it was, or start over with recover.mode=off")
    parts = facts.optimizer_parts or dict.fromkeys(facts.optimizer_steps, MOMENTS)
    prefix = MASTER if facts.master_weights == TENSORS_FILE else ""
    with open_tensors(folder / TENSORS_FILE) as state, open_tensors(folder / facts.master_weights) as master:
        for name, shape in shapes.items():
            master.expect(prefix + name, shape)
        for name in facts.optimizer_steps:
            if name not in shapes:
                raise CheckpointError(f"{folder / FACTS_FILE} has {name}, which the model lacks", UNUSABLE)
            for part in parts[name]:
                if is_adamw:
                    state.expect(f"{part}.{name}", shapes[name])
                elif f"{part}.{name}" not in state:
                    raise CheckpointError(f"{folder / TENSORS_FILE} lacks {part}.{name}", UNUSABLE)
        _try_torch_random(state, folder / TENSORS_FILE)
        put(
            StateReader(
                steps=facts.optimizer_steps,
                parts=parts,
                weight=lambda name: master.read(prefix + name),
                moment=lambda moment, name: state.read(f"{moment}.{name}"),
            )
        )
        _set_random(state, facts)


def _try_torch_random(state: StoredTensors, path: Path) -> None:
    state.expect(RANDOM_STATE)
    try:
        torch.Generator().set_state(state.read(RANDOM_STATE))
    except RuntimeError as error:
        raise CheckpointError(f"{path} is damaged: {RANDOM_STATE}: {error}", UNUSABLE) from error


def _torch_random() -> dict[str, Tensor]:
    states = {RANDOM_STATE: torch.get_rng_state()}
    if _on_gpu():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random(state: StoredTensors, facts: TrainingFacts) -> None:
    random.setstate(facts.python_random)
    np.random.set_state(facts.numpy_random)
    torch.set_rng_state(state.read(RANDOM_STATE))
    if _on_gpu() and "random.cuda" in state:
        torch.cuda.set_rng_state(state.read("random.cuda"))


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
