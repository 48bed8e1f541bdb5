"""Which prompts each epoch has, and in which order: the queue takes them so, and the audit of a ledger expects them so.

An epoch's order is a sort of the ids by a hash of (seed, epoch, id). Unlike a random shuffle it is the same under every
version of Python and numpy, and doesn't depend on the order in which the data set was read, so a run resumes exactly.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Prompts of which each epoch has the next `in_epoch`; after the last comes the first."""

    ids: tuple[str, ...]
    in_epoch: int


class PromptOrder:
    """Raises ValueError where there is no id, or one repeats."""

    def __init__(self, ids: Sequence[str], *, seed: int, shuffle: bool, circles: Sequence[Circle] = ()) -> None:
        """`circles`: of some ids, of which each epoch has the next few, in an order drawn from the seed alone."""
        if not ids or len(set(ids)) != len(ids):
            raise ValueError("prompt ids must be unique, and at least one")
        self.ids = tuple(ids)
        self.seed = seed
        self.shuffle = shuffle
        self._circles = [
            replace(circle, ids=tuple(sorted(circle.ids, key=lambda one: _digest(seed, "circle", one))))
            for circle in circles
        ]
        self._size = len(ids) - sum(len(circle.ids) - circle.in_epoch for circle in circles)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return self._size

    def ids_of(self, epoch: int) -> tuple[str, ...]:
        """In the order in which that epoch takes them."""
        ids = self.ids
        for circle in self._circles:
            start = epoch * circle.in_epoch
            left_out = {
                circle.ids[n % len(circle.ids)] for n in range(start + circle.in_epoch, start + len(circle.ids))
            }
            ids = tuple(one for one in ids if one not in left_out)
        if not self.shuffle:
            return ids
        return tuple(sorted(ids, key=lambda prompt_id: _digest(self.seed, epoch, prompt_id)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Cached: the queue is saved after each step, and hashing a million ids took most of a second."""
        ids = sorted(self.ids) if self.shuffle else self.ids
        return _digest(self.seed, self.shuffle, *ids, *(circle.in_epoch for circle in self._circles))


def share_of(weight: float, count: int) -> tuple[int, int]:
    """How often an epoch has all of `count` prompts, and how many of them once more; at least one in all."""
    times, rest = divmod(round(weight * count), count)
    return (times, rest) if times or rest else (0, 1)


def weighted_ids(ids: Sequence[str], weight: float) -> tuple[list[str], Circle | None]:
    """The ids of a data set's prompts with their copies, and of which of these an epoch has only some."""
    times, rest = share_of(weight, len(ids))
    copies = [[f"{one}*{n + 1}" if n else one for one in ids] for n in range(times + (rest > 0))]
    circle = Circle(ids=tuple(copies[-1]), in_epoch=rest) if rest else None
    return [one for copy in copies for one in copy], circle


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
