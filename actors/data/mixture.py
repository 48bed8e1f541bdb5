"""How often an epoch has the prompts of a training data set, by the data set's weight.

Weight 1: each once. Weight 2: each twice, as two prompts. Weight 0.5: half of them, and the other half in the next
epoch. So a weight of w means that e epochs have each prompt w·e times, rounded up or down, whatever fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.base.rollouts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Prompts of which each epoch has the next `in_epoch`; after the last comes the first."""

    ids: tuple[str, ...]
    in_epoch: int


def share_of(weight: float, count: int) -> tuple[int, int]:
    """How often an epoch has all of `count` prompts, and how many of them once more; at least one in all."""
    times, rest = divmod(round(weight * count), count)
    return (times, rest) if times or rest else (0, 1)


def in_epoch(weight: float, count: int) -> int:
    times, rest = share_of(weight, count)
    return times * count + rest


def mixed(prompts: Sequence[Prompt], weight: float) -> tuple[list[Prompt], Circle | None]:
    """The prompts with their copies, and of which of these an epoch has only some."""
    times, rest = share_of(weight, len(prompts))
    copies = [[replace(one, id=_copy(one.id, n)) for one in prompts] for n in range(times + (rest > 0))]
    circle = Circle(ids=tuple(one.id for one in copies[-1]), in_epoch=rest) if rest else None
    return [one for copy in copies for one in copy], circle


def _copy(prompt_id: str, n: int) -> str:
    return f"{prompt_id}*{n + 1}" if n else prompt_id
