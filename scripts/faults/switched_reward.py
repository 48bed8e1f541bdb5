"""A reward function and an agent that can be broken while a run uses them (faults S1, S2, S3, T3, trap X-reward).

    GRPO_REWARD_SWITCH=/some/where/switch.json python -m launcher … reward.fn=scripts.faults.switched_reward:reward
    GRPO_REWARD_SWITCH=… … conf=arithmetic_tool_cpu rollout.episode=scripts.faults.switched_reward:solve

They are `actors.reward:gsm8k_reward` and `actors.reward.calculator:solve` as long as the file named by
GRPO_REWARD_SWITCH isn't there. While it is, it holds one JSON object {"do": …, "share": 0.3, "stall_s": 5, "seed": 1};
`do` is one of

    zero   0                     share   0 for a share of the completions, the same ones for the same seed
    one    1                     huge    around 1e308 for a share of the prompts: finite, but no two have a mean
    raise  raises                hang    never returns
    stall  once in each process: stall_s seconds, then the true reward

Each completion so treated appends a byte to `<file>.fired`, which shows that a fault has fired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.reward import calculator
from actors.reward.gsm8k import gsm8k_reward
from scripts.faults.broken_reward import told


def reward(*, completion: str, answer: str, prompt_id: str, record: Mapping[str, object]) -> float:
    """The true reward, or what the switch says."""
    value = told(prompt_id, completion)
    if value is None:
        return gsm8k_reward(completion=completion, answer=answer, prompt_id=prompt_id, record=record)
    return value


async def solve(record: Mapping[str, Any], client: Any, prompt_id: str, api_key: str) -> float:
    """The same for episodes, told apart by their keys."""
    true = await calculator.solve(record, client)
    value = told(prompt_id, api_key)
    return true if value is None else value
