"""Benchmark `state`: how long a step waits while its state is written into memory, for states of any size."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from actors.model.stored_tensors import overwrite_tensors
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED, SLOTS
from scripts.benchmark.ratios import spread

TENSORS = 72
MB = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, nargs="+", default=[5, 50, 500], help="sizes of the state")
    parser.add_argument("--times", type=int, default=20, help="writes of each size")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    measured: dict[str, object] = {}
    for size in arguments.megabytes:
        seconds = measure(size, arguments.times)
        print(f"{size:6} MB   {spread([1000 * second for second in seconds], ' ms', 1)}")
        measured[str(size)] = seconds
    return measured


def measure(megabytes: int, times: int) -> list[float]:
    """Seconds of each write into the two slots in turn, the first of each slot left out: it finds no pages yet."""
    tensors = {f"tensor{index}": torch.randn(megabytes * MB // 4 // TENSORS) for index in range(TENSORS)}
    seconds = []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=MEMORY_BACKED) as folder:
        for number in range(times + len(SLOTS)):
            began = time.perf_counter()
            overwrite_tensors(Path(folder) / SLOTS[number % len(SLOTS)], tensors)
            seconds.append(time.perf_counter() - began)
    return seconds[len(SLOTS) :]
