"""Reads the rewards of an AReaL run from its trainer's log, for the catalog of checkpoints.

Only the lines that matter are looked at. Steps are counted from 1 in the log and from 0 here; after a recovery the
numbers go back, and the later line counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from launcher.policy.reward_health import RewardPoint

LOGS = ("trainer.log", "main.log", "merged.log", "actor.log")
LARGEST = 2**30
"""Bytes; of a larger log its end is read, which the newest checkpoints are of."""
_STEP = re.compile(rb"Epoch \d+/\d+ Step \d+/(\d+) Train step (\d+)/\d+ done\.")
_REWARD = re.compile(rb"/task_reward/(avg|min|max)\s*\xe2\x94\x82\s*([-+.\deE]+|nan|inf|-inf)")


def read_areal_rewards(logs: Path, *, largest: int = LARGEST) -> tuple[RewardPoint, ...]:
    """Of the steps that count, in order; empty where no log has any."""
    for name in LOGS:
        points = _read(logs / name, largest)
        if points:
            return tuple(points)
    return ()


def read_steps_per_epoch(logs: Path) -> int | None:
    """From the first step in the log."""
    for name in LOGS:
        match = _search(logs / name, lambda line: _STEP.search(line))
        if match is not None:
            return int(match[1])
    return None


def _search(file: Path, find: Callable[[bytes], re.Match[bytes] | None]) -> re.Match[bytes] | None:
    try:
        with file.open("rb") as lines:
            return next((match for line in lines if (match := find(line)) is not None), None)
    except OSError:
        return None


def _read(file: Path, largest: int) -> list[RewardPoint]:
    points: list[RewardPoint] = []
    step: int | None = None
    found: dict[bytes, float] = {}
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - largest))
            for line in lines:
                if b"Train step" in line and (match := _STEP.search(line)):
                    step, found = int(match[2]) - 1, {}
                elif b"task_reward/" in line:
                    found |= {key: float(value) for key, value in _REWARD.findall(line)}
                    if step is not None and len(found) == 3:
                        _take(points, step, found)
                        found = {}
    except OSError:
        return points
    return points


def _take(points: list[RewardPoint], step: int, found: dict[bytes, float]) -> None:
    """Up to 0.4.0 a step has a table for each minibatch: the first is of the step's own rollouts."""
    if points and points[-1].step == step:
        return
    while points and points[-1].step >= step:
        points.pop()
    mean, low, high = (found.get(key, math.nan) for key in (b"avg", b"min", b"max"))
    points.append(RewardPoint(step=step, mean=mean, low=low, high=high))
