"""The stall of a step by its state's way into memory, for states of any size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from actors.model.stored_tensors import overwrite_tensors
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED, SLOTS
from scripts.benchmark.ratios import spread

TENSORS = 72
MB = 10**6


def measure(megabytes: Sequence[int], times: int) -> dict[int, list[float]]:
    """Seconds of each write into the two slots in turn, the first of each slot left out: it finds no pages yet."""
    torch.set_num_threads(1)
    return {size: _measure(size, times) for size in megabytes}


def _measure(megabytes: int, times: int) -> list[float]:
    tensors = {f"tensor{index}": torch.randn(megabytes * MB // 4 // TENSORS) for index in range(TENSORS)}
    seconds = []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=MEMORY_BACKED) as folder:
        for number in range(times + len(SLOTS)):
            began = time.perf_counter()
            overwrite_tensors(Path(folder) / SLOTS[number % len(SLOTS)], tensors)
            seconds.append(time.perf_counter() - began)
    return seconds[len(SLOTS) :]


def report(measured: dict[int, list[float]]) -> dict[str, object]:
    for size, seconds in measured.items():
        print(f"{size:6} MB   {spread([1000 * second for second in seconds], ' ms', 1)}")
    return {str(size): seconds for size, seconds in measured.items()}
