"""The most memory that each trial was seen to hold, looked at from outside while it runs.

All processes of the run on this machine: its driver's descendants, and below the guards that write its servers' logs
the servers themselves, which have left the driver's tree. Shared pages count by their share (PSS). Of a trial's GPUs
it is what NVML says is used, by whomever. A peak between two looks is not seen. What was seen is kept in a file, so
that a sweep that is killed doesn't lose it. Trials in another cluster run elsewhere: of them nothing is known here.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from launcher.base.durable import replace_file
from launcher.resources.hardware import memory_in_use
from launcher.run_files.run_paths import RunPaths

GUARD = "actors.processes.process_guard"
KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes; None where nothing was seen. `servers` are part of `all`; `gpu` is of the trial's fullest GPU."""

    all: int | None = None
    servers: int | None = None
    gpu: int | None = None

    def with_look(self, look: Peak) -> Peak:
        return Peak(
            all=_larger(self.all, look.all),
            servers=_larger(self.servers, look.servers),
            gpu=_larger(self.gpu, look.gpu),
        )


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
    below: defaultdict[int, list[int]] = defaultdict(list)
    guards = []
    for process in psutil.process_iter(["ppid", "cmdline"]):
        below[process.info["ppid"] or 0].append(process.pid)
        words = process.info["cmdline"] or []
        if GUARD in words and any(word.startswith(f"{paths.logs}/") for word in words):
            guards.append(process.pid)
    servers = {pid for guard in guards for pid in _tree(guard, below)}
    everyone = servers | set(_tree(driver, below))
    held = {pid: _pss(pid) for pid in everyone}
    used = [memory_in_use().get(f"GPU {gpu} memory", (0.0, 0.0))[0] for gpu in gpus]
    return Peak(
        all=sum(held.values()) or None,
        servers=sum(held[pid] for pid in servers) or None,
        gpu=int(max(used, default=0.0)) or None,
    )


def _tree(root: int, below: dict[int, list[int]]) -> Iterator[int]:
    waiting, seen = [root], set()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            yield pid
            waiting += below.get(pid, [])


def _pss(pid: int) -> int:
    """Proportional set size in bytes; 0 once it has ended, or where it is another user's."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
