"""Where memory is: GPUs and the hosts of nodes, what the plan puts there, and those that are alike as one. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """One GPU or a node's host memory, in bytes: what it has, and what the plan puts there."""

    name: str
    node: int
    gpu: int | None
    capacity: int
    planned: int

    @property
    def headroom(self) -> int:
        return self.capacity - self.planned


def places_alike(places: Sequence[MemoryPlace]) -> list[tuple[str, MemoryPlace]]:
    """Neighbours on one node with the same memory and the same plan for it, under one name."""
    groups: dict[Hashable, list[MemoryPlace]] = {}
    for place in places:
        kind = place.name.rpartition("(")[2] if place.gpu is not None else ""
        groups.setdefault((place.node, place.gpu is None, kind, place.capacity, place.planned), []).append(place)
    return [(_name(group), group[0]) for group in groups.values()]


def _name(group: Sequence[MemoryPlace]) -> str:
    first = group[0]
    if first.gpu is None or len(group) == 1:
        return first.name
    numbers = ranges(place.gpu for place in group if place.gpu is not None)
    return first.name.replace(f"GPU {first.gpu} ", f"GPU {numbers} ", 1)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6; two neighbours stay two numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(words)
