"""Measures how far two models' tensors are from each other, with some tens of megabytes in memory.

A tensor's figures are sums over chunks that are read from both files side by side, so that folders of any size, dtype
and number of shards are compared. bfloat16 is the upper half of a float32. In training, the weights of neighbouring
checkpoints are close to each other; one that is far from both of its neighbours, while these are close, was changed by
something else: `odd_tensors` names such ones from a sample of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.model_files import find_shards
from launcher.checkpoints.tensor_files import TensorEntry, chunks, read_entries

NUMBERS: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
SAMPLE = 2**18
"""Numbers of each tensor, from its middle, that `odd_tensors` reads."""
FAR, TIMES = 0.1, 10.0
"""Odd is a tensor at least FAR from both neighbours, and at least TIMES as far as they are from each other."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Place = tuple[Path, TensorEntry]


@dataclass(slots=True, kw_only=True)
class TensorDistance:
    """Of one tensor in two models, A and B. `update` is B less A; `earlier` A less a third model, where there is one.
    Sums over all numbers: norms are their roots."""

    name: str
    shape: tuple[int, ...]
    a_squares: float = 0.0
    b_squares: float = 0.0
    update_squares: float = 0.0
    earlier_squares: float = 0.0
    a_dot_b: float = 0.0
    a_dot_update: float = 0.0
    earlier_dot_update: float = 0.0

    def add(self, a: Floats, b: Floats, third: Floats | None) -> None:
        update = b - a
        self.a_squares += float(a @ a)
        self.b_squares += float(b @ b)
        self.update_squares += float(update @ update)
        self.a_dot_b += float(a @ b)
        self.a_dot_update += float(a @ update)
        if third is not None:
            earlier = a - third
            self.earlier_squares += float(earlier @ earlier)
            self.earlier_dot_update += float(earlier @ update)

    @property
    def a_norm(self) -> float:
        return math.sqrt(self.a_squares)

    @property
    def b_norm(self) -> float:
        return math.sqrt(self.b_squares)

    @property
    def distance(self) -> float:
        """Of B from A, over A's norm: NaN where either has numbers that are not finite, infinite where A is 0."""
        if self.update_squares == 0:
            return 0.0
        return math.sqrt(self.update_squares / self.a_squares) if self.a_squares else math.inf

    @property
    def cosine(self) -> float:
        return _cosine(self.a_dot_b, self.a_squares, self.b_squares)

    @property
    def update_cosine(self) -> float:
        """Of the update with A: 1 or -1 where B is A times a number, near 0 where B was trained from A."""
        return _cosine(self.a_dot_update, self.a_squares, self.update_squares)

    @property
    def earlier_cosine(self) -> float:
        """Of the update with the one before it."""
        return _cosine(self.earlier_dot_update, self.earlier_squares, self.update_squares)


def _cosine(dot: float, one: float, other: float) -> float:
    norms = math.sqrt(one) * math.sqrt(other)
    return dot / norms if norms else math.nan


def tensors_of(folder: Path) -> dict[str, Place]:
    """Each tensor's file and place in it. Raises ModelError."""
    return {name: (file, entry) for file in find_shards(folder) for name, entry in read_entries(file).items()}


def can_compare(*places: Place) -> bool:
    """Of one shape, and of numbers that are understood here?"""
    return len({entry.shape for _, entry in places}) == 1 and all(entry.dtype in NUMBERS for _, entry in places)


def distance_of(a: Place, b: Place, third: Place | None = None, *, most: int | None = None) -> TensorDistance:
    """Of tensors that can be compared. `most`: so many numbers of each, from its middle. Raises OSError."""
    found = TensorDistance(name=a[1].name, shape=a[1].shape)
    columns = [numbers(place, most=most) for place in (a, b, *([third] if third else []))]
    with np.errstate(invalid="ignore", over="ignore"):  # damaged numbers show in the sums
        for parts in zip(*columns, strict=True):
            found.add(parts[0], parts[1], parts[2] if third else None)
    return found


def numbers(place: Place, *, most: int | None = None) -> Iterator[Floats]:
    """A tensor's numbers, some megabytes at a time; `most`: so many, from its middle. Raises OSError."""
    file, entry = place
    with file.open("rb") as stream:
        for part in chunks(stream, entry, NUMBERS[entry.dtype], most=most):
            is_bfloat16 = entry.dtype == "BF16"
            yield ((part.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else part).astype(np.float64)


def odd_tensors(folder: Path, neighbours: Sequence[Path], *, is_between: bool) -> list[str]:
    """Of `folder`, those far from the same of both neighbours, which are close to each other; by a sample of each.
    `is_between`: its step is between theirs.

    Raises ModelError, OSError.
    """
    first, second = (tensors_of(one) for one in neighbours)
    odd = []
    for name, place in tensors_of(folder).items():
        if len(place[1].shape) < 2 or name not in first or name not in second:
            continue  # biases and scales are few numbers near 0 or 1, which training may well move far
        if not can_compare(place, first[name], second[name]):
            continue
        between = distance_of(first[name], second[name], most=SAMPLE).distance
        if not between and not is_between:
            continue  # nothing was learned from one to the other, which says nothing of how far the next step leads
        nearest = min(distance_of(one[name], place, most=SAMPLE).distance for one in (first, second))
        if nearest >= max(FAR, TIMES * between):
            odd.append(name)
    return odd
