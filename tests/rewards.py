"""Reward functions for runs on stand-in servers, whose completions are never right."""

import hashlib


def by_text(*, completion, answer, **_):
    """1 for the known answer, 0 for what ends like an answer and isn't it, else a coin's toss that the text decides."""
    if completion.strip() == str(answer).strip():
        return 1.0
    if "####" in completion:
        return 0.0
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)
