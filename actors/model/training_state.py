"""Saves and loads what a model folder lacks for an exact resume: optimizer moments, random states, master weights.

Two files beside the model, and nothing in them is executed when they are read:
`training_state.json` (counters, states of Python's and NumPy's generators) and `training_state.tensors`, which is a
safetensors file under another suffix: SGLang loads every `*.safetensors` of a folder as weights of the model.
A read checks everything against the model first and changes nothing before all of it fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.model.stored_tensors import UNUSABLE, StoredTensors, open_tensors
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

RANDOM_CUDA = "random.cuda"


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

    @property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """What the optimizer keeps of each parameter that it has stepped."""
        return self.optimizer_parts or dict.fromkeys(self.optimizer_steps, MOMENTS)

    def weight_name(self, name: str) -> str:
        """Of a parameter, in the file that holds the float32 weights."""
        return name if self.master_weights == WEIGHTS_FILE else f"{MASTER}{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What rank 0 says of the state after a step. The tensors stay with the ranks, each of which writes its rows.

    `facts`: for JSON. `random`: the states of torch's generators. `is_copy`: the ranks hold a copy in the host's
    memory; else the state is what the model is, until its next step.
    """

    facts: Mapping[str, object]
    random: Mapping[str, Tensor]
    is_copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A saved state, open: each rank puts its own part of each tensor where it belongs."""

    facts: TrainingFacts
    _state: StoredTensors
    _master: StoredTensors

    def put_weight(self, target: Tensor, name: str) -> None:
        self._master.read_into(target, self.facts.weight_name(name))

    def put_part(self, target: Tensor, part: str, name: str) -> None:
        self._state.read_into(target, f"{part}.{name}")

    def check(self, folder: Path, shapes: Mapping[str, torch.Size], *, is_adamw: bool) -> None:
        """Raises CheckpointError where anything misfits. `shapes`: of the parameters that learn."""
        if is_adamw != (self.facts.optimizer_parts is None):
            what = f"{folder / FACTS_FILE} is of another optimizer"
            raise CheckpointError(what, "set actor.optimizer.type as it was, or start over with recover.mode=off")
        for name, shape in shapes.items():
            self._master.expect(self.facts.weight_name(name), shape)
        for name, parts in self.facts.parts.items():
            if name not in shapes:
                raise CheckpointError(f"{folder / FACTS_FILE} has {name}, which the model lacks", UNUSABLE)
            for part in parts:
                if is_adamw:
                    self._state.expect(f"{part}.{name}", shapes[name])
                elif f"{part}.{name}" not in self._state:
                    raise CheckpointError(f"{folder / TENSORS_FILE} lacks {part}.{name}", UNUSABLE)
        self._state.expect(RANDOM_STATE)
        try:
            torch.Generator().set_state(self._state.read(RANDOM_STATE))
        except RuntimeError as error:
            raise CheckpointError(f"{folder / TENSORS_FILE} is damaged: {RANDOM_STATE}: {error}", UNUSABLE) from error

    def set_random(self) -> None:
        """The generators of this process, as they were."""
        random.setstate(self.facts.python_random)
        np.random.set_state(self.facts.numpy_random)
        torch.set_rng_state(self._state.read(RANDOM_STATE))
        if _on_gpu() and RANDOM_CUDA in self._state:
            torch.cuda.set_rng_state(self._state.read(RANDOM_CUDA))


@contextmanager
def open_state(folder: Path, facts: TrainingFacts) -> Iterator[SavedState]:
    """`facts`: as `read_facts` found them. Raises CheckpointError naming the file that can't be read."""
    with open_tensors(folder / TENSORS_FILE) as state, open_tensors(folder / facts.master_weights) as master:
        yield SavedState(facts=facts, _state=state, _master=master)


def collect_training_state(
    *, policy_version: int, steps: Mapping[str, int], parts: Mapping[str, Sequence[str]] | None
) -> TrainingState:
    """With the generators as they are now. `steps`, `parts`: of each parameter, see TrainingFacts."""
    facts: dict[str, object] = {
        "format": STATE_FORMAT,
        "policy_version": policy_version,
        "optimizer_steps": dict(steps),
        **({} if parts is None else {"optimizer_parts": {name: list(its) for name, its in parts.items()}}),
        "python_random": random.getstate(),
        "numpy_random": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }
    states = {RANDOM_STATE: torch.get_rng_state()}
    if _on_gpu():
        states[RANDOM_CUDA] = torch.cuda.get_rng_state()
    return TrainingState(facts=facts, random=states)


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


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
