"""Reward functions for runs on stand-in servers, whose completions are never right."""

import hashlib

from scripts.faults import broken_reward


def by_text(*, completion, answer, **_):
    """1 for the known answer, 0 for what ends like an answer and isn't it, else a coin's toss that the text decides."""
    if completion.strip() == str(answer).strip():
        return 1.0
    if "####" in completion:
        return 0.0
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)


def switched(*, completion, answer, prompt_id, **more):
    """`by_text`, or what the switch says (scripts/faults/switched_reward.py). `zero_unless_known`, which is only here:
    0 for what a policy writes, while the known answers go on to get what they must: a policy that collapsed."""
    said, written = broken_reward.switch()
    if said is None:
        return by_text(completion=completion, answer=answer)
    if said["do"] == "zero_unless_known":
        return float(completion.strip() == str(answer).strip())
    value = broken_reward.broken(said, written, prompt_id, completion)
    return by_text(completion=completion, answer=answer) if value is None else value
