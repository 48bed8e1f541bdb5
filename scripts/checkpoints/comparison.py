"""Compares two models tensor by tensor, and says what of it training does not do; no more than was seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from launcher.base.errors import ModelError
from launcher.base.wording import some_of
from launcher.checkpoints.verification import verify
from launcher.checkpoints.weight_distances import TensorDistance, can_compare, distance_of, tensors_of

FAR = 0.1
"""Of a tensor's own norm. Training with RL moves it by a thousandth between checkpoints."""
TIMES = 20.0
"""Stands out: so many times as far as the median of all."""
SAME_DIRECTION = 0.999
"""Cosine of the update with the weights from which on they were multiplied, or faded."""
SUMS = (
    *("a_squares", "b_squares", "update_squares", "earlier_squares", "a_dot_b", "a_dot_update", "earlier_dot_update"),
)
_names = partial(some_of, most=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`tensors`: those that both have, in A's order; `total`: over them all. `against`: what speaks against B (or A).
    `unlooked`: what could not be compared, and why."""

    a: Path
    b: Path
    has_base: bool
    tensors: tuple[TensorDistance, ...]
    total: TensorDistance
    against: tuple[str, ...]
    unlooked: tuple[str, ...]


def compare(a: Path, b: Path, base: Path | None = None) -> Comparison:
    """Raises ModelError, OSError: one of them is no model that can be read."""
    first, second, third = (tensors_of(a), tensors_of(b), tensors_of(base) if base else {})
    shared = [name for name in first if name in second]
    fit = [name for name in shared if can_compare(first[name], second[name])]
    if not fit:
        raise ModelError(f"{a} and {b} have no tensor in common", "are they of one model?")
    found = []
    for name in fit:
        earlier = third.get(name)
        if earlier is not None and not can_compare(first[name], earlier):
            earlier = None
        found.append(distance_of(first[name], second[name], earlier))
    unlooked = [
        *_listed(
            "not of one shape, or of numbers that are not known here", [name for name in shared if name not in fit]
        ),
        *_listed("only in A", sorted(first.keys() - second.keys())),
        *_listed("only in B", sorted(second.keys() - first.keys())),
    ]
    return Comparison(
        a=a,
        b=b,
        has_base=base is not None,
        tensors=tuple(found),
        total=_total(found),
        against=(*_faults("A", a), *_faults("B", b), *odd(found)),
        unlooked=tuple(unlooked),
    )


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{what}: {_names(names)}"


def _faults(letter: str, folder: Path) -> Iterator[str]:
    """What is wrong with it by itself: bytes, shapes, numbers, matrices without content."""
    for problem in verify(folder).problems:
        yield f"{letter}: {problem}"


def _total(found: Sequence[TensorDistance]) -> TensorDistance:
    total = TensorDistance(name="all of them", shape=())
    for name in SUMS:
        setattr(total, name, math.fsum(getattr(one, name) for one in found))
    return total


def odd(found: Sequence[TensorDistance]) -> Iterator[str]:
    """What no training does, or hardly."""
    distances = [one.distance for one in found if math.isfinite(one.distance)]
    usual = median(distances) if distances else math.nan
    matrices = [one for one in found if len(one.shape) > 1 and one.distance >= FAR]
    scaled = [one for one in matrices if abs(one.update_cosine) >= SAME_DIRECTION]
    for one in scaled[:4]:
        yield f"{one.name} is A's times {one.b_norm / one.a_norm:.3g}" if one.a_norm else f"{one.name} was 0 in A"
    if len(scaled) > 4:
        yield f"so are {len(scaled) - 4} more, of {len(found)} tensors"
    far = [one for one in matrices if one not in scaled and one.distance >= TIMES * usual]
    if far:
        furthest = max(one.distance for one in far)
        names = _names([one.name for one in far])
        yield f"{names}: up to {furthest:.2g} of its norm away, the median of all tensors {usual:.2g}"


def sentence(found: Comparison) -> str:
    """The answer, as far as weights alone give one."""
    count, total = len(found.tensors), found.total
    if found.against:
        return f"SOMETHING ELSE THAN TRAINING: {len(found.against)} findings in {count} tensors"
    if not total.update_squares:
        return f"EQUAL: every number of {count} tensors is the same"
    furthest = max((one for one in found.tensors if math.isfinite(one.distance)), key=lambda one: one.distance)
    said = f"all of it {total.distance:.2g} of its norm away, {furthest.name} the furthest with {furthest.distance:.2g}"
    if total.distance >= FAR:
        return f"FAR APART: {said}: not near enough that the weights could show whether B is sound"
    return f"CLOSE: {said}; nothing in the weights says that B is broken (how it answers: --answers)"
