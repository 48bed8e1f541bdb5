"""Measures the most memory that each trial holds while it runs, from outside.

All processes of the run on this machine: its driver's descendants, and below the hosts that write its servers' logs
the servers themselves, which have left the driver's tree. Shared pages count by their share (PSS). Of a trial's GPUs
it is what NVML reports, of any process. A peak between two samples is not seen. What was seen is kept in a file, so
that a sweep that is killed doesn't lose it. Trials in another cluster run elsewhere: of them nothing is known here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from launcher.base.durable import replace_file
from launcher.resources.hardware import memory_in_use
from launcher.run_files.run_paths import RunPaths

HOST = "process-host"  # actors/processes/process_host.py, which this layer does not import


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes; None where nothing was seen. `servers` are part of `all`; `gpu` is of the trial's fullest GPU."""

    all: int | None = None
    servers: int | None = None
    gpu: int | None = None

    def with_look(self, look: Self) -> Self:
        mine, new = asdict(self), asdict(look)
        return replace(self, **{name: max(mine[name] or 0, new[name] or 0) or None for name in mine})


class Peaks:
    """Of each trial by name, kept in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[str, Peak] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # of none, or a damaged file, nothing is known
            self._of = {str(name): Peak(**seen) for name, seen in json.loads(path.read_bytes()).items()}

    def of(self, trial: str) -> Peak:
        return self._of.get(trial, Peak())

    def add(self, trial: str, look: Peak) -> None:
        """Raises OSError."""
        highest = self.of(trial).with_look(look)
        if highest != self.of(trial):
            self._of[trial] = highest
            replace_file(self._path, json.dumps({name: asdict(peak) for name, peak in self._of.items()}).encode())


def look_at(driver: int, paths: RunPaths, gpus: Sequence[int]) -> Peak:
    """What the run of this driver holds now."""
    servers: dict[int, int] = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] == HOST and any(word.startswith(f"{paths.logs}/") for word in words):
            servers |= _memory_of_tree(process.pid)
    in_use = memory_in_use() if gpus else {}
    used = [in_use.get(f"GPU {gpu} memory", (0.0, 0.0))[0] for gpu in gpus]
    return Peak(
        all=sum((_memory_of_tree(driver) | servers).values()) or None,
        servers=sum(servers.values()) or None,
        gpu=int(max(used, default=0.0)) or None,
    )


def _memory_of_tree(root: int) -> dict[int, int]:
    """Bytes of each process from `root` down, without those that have ended meanwhile or are another user's."""
    held = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (top := psutil.Process(root), *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                held[process.pid] = process.memory_full_info().pss
    return held
