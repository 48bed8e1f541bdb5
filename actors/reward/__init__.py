"""Scores completions with the reward function that `reward.fn` names, each completion in a process that may be killed.

May import `actors.data`, `actors.processes` and the launcher's rooms below `actors`. Begin with `reward_pool`.
`actors.reward:gsm8k_reward` is the name that users write, so the function is reached through the package; it is
imported on first use, since sympy takes 0.4 s and only the reward process needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.reward.gsm8k import gsm8k_reward

__all__ = ["gsm8k_reward"]


def __getattr__(name: str) -> object:
    if name == "gsm8k_reward":
        from actors.reward.gsm8k import gsm8k_reward

        return gsm8k_reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
