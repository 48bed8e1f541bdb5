"""The switch of switched_reward.py and the rewards that follow from it.

Apart from the true reward, whose imports take a reward worker longer than all else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "GRPO_REWARD_SWITCH"
FUNCTION = "scripts.faults.switched_reward:reward"
SOLVE = "scripts.faults.switched_reward:solve"
"""In place of actors.reward.calculator:solve."""
HUGE, APART = 1e308, 3e305
"""The sum of any two is beyond a float64; no two of a group are equal, or their advantages would be exact zeros."""

_stalled: set[int] = set()


class Switched(Exception):
    """The switch made the reward function raise."""


def fired(switch: Path) -> int:
    """How many completions were treated so far."""
    try:
        return switch.with_name(switch.name + ".fired").stat().st_size
    except FileNotFoundError:
        return 0


def switch() -> tuple[dict[str, Any] | None, int]:
    """The file's content, and when it was written (ns)."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None, 0
    try:
        with Path(path).open() as file:
            return json.load(file), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None, 0


def of_token_ids(token_ids: Sequence[int]) -> float:
    """For a model with random weights, none of whose answers is right: 0 or 1, by chance."""
    return float(sum(token_ids) % 2)


def told(prompt_id: str, completion: str) -> float | None:
    """By the switch as it is now; None for the true reward."""
    said, written = switch()
    return None if said is None else broken(said, written, prompt_id, completion)


def broken(said: Mapping[str, Any], written: int, prompt_id: str, completion: str) -> float | None:
    """None for the true reward."""
    what = prompt_id if said["do"] == "huge" else f"{prompt_id}\0{completion}"
    drawn = int.from_bytes(_digest(f"{said['seed']}\0{what}")[:8]) / 2**64
    match said["do"]:
        case "share" | "huge" if drawn >= said["share"]:
            return None
        case "stall" if written in _stalled:
            return None
    _count()
    match said["do"]:
        case "zero" | "share":
            return 0.0
        case "one":
            return 1.0
        case "huge":
            return HUGE + APART * _digest(completion)[0]
        case "raise":
            raise Switched("told to raise by the switch")
        case "hang":
            while True:
                time.sleep(3600)
        case "stall":
            _stalled.add(written)
            time.sleep(said["stall_s"])
            return None
    raise Switched(f"the switch says {said['do']!r}, which is nothing that this function does")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _count() -> None:
    path = Path(os.environ[VARIABLE])
    fd = os.open(path.with_name(path.name + ".fired"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, b".")
    finally:
        os.close(fd)
