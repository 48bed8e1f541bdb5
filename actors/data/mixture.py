"""How often an epoch has the prompts of a training data set, by the data set's weight.

Weight 1: each once. Weight 2: each twice, as two prompts. Weight 0.5: half of them, and the other half in the next
epoch. So a weight of w means that e epochs have each prompt w·e times, rounded up or down, whatever fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.base.prompt_order import Circle, share_of, weighted_ids
from launcher.base.rollouts import Prompt


def in_epoch(weight: float, count: int) -> int:
    times, rest = share_of(weight, count)
    return times * count + rest


def mixed(prompts: Sequence[Prompt], weight: float) -> tuple[list[Prompt], Circle | None]:
    """The prompts with their copies, and of which of these an epoch has only some."""
    ids, circle = weighted_ids([one.id for one in prompts], weight)
    return [replace(prompts[n % len(prompts)], id=one) for n, one in enumerate(ids)], circle
