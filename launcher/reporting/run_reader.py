"""Reads the files of a run line by line as they grow, and keeps as little of them as the report needs.

    metrics.jsonl ─► log, figures      events.jsonl ─► log      ledger.jsonl ─► ledger      memory.jsonl ─► memory

Nothing is judged here: launcher/reporting/run_facts.py does that, from all of it, each time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.reporting.figures import Figures
from launcher.run_files.journal import Record
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.file_follower import FileFollower
from launcher.run_log.line_values import as_float, as_integer, as_unix_time
from launcher.run_log.run_log import RunLog

MOST_MEMORY = 4000
"""Readings kept; beyond that the larger of two neighbours stays, so that no peak is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes used and bytes there are, by name."""

    time: float
    in_use: Mapping[str, tuple[float, float]]


class RunData:
    """All attempts of a run. Lines come in the order of their files."""

    def __init__(self) -> None:
        self.log = RunLog()
        self.figures = Figures()
        self.ledger: list[Record] = []
        self.memory: list[MemoryReading] = []
        self.rollouts_failed = self.rollouts_retried = 0
        self.not_read: tuple[str, ...] = ()
        self._since_memory = 0
        self._thinning = 1

    def take_step(self, line: Record) -> bool:
        if not self.log.take_step(line):
            return False
        self.figures.add(self.log.steps[-1].step, line)
        return True

    def take_ledger(self, line: Record) -> bool:
        step, versions = as_integer(line.get("global_step")), line.get("weight_versions")
        if step is None:
            return False
        self.rollouts_failed += as_integer(line.get("rollouts_failed")) or 0
        self.rollouts_retried += as_integer(line.get("rollouts_retried")) or 0
        known = versions if isinstance(versions, list) and all(isinstance(one, int) for one in versions) else None
        names = {key: _names(line.get(key)) for key in ("prompt_ids", "filtered_ids") if key in line}
        attempt = as_integer(line.get("attempt"))
        self.ledger.append({"global_step": step, "attempt": attempt, "weight_versions": known, **names})
        return True

    def take_event(self, line: Record) -> bool:
        return self.log.take_event(line)

    def take_memory(self, line: Record) -> bool:
        in_use = line.get("in_use")
        if not isinstance(in_use, dict):
            return False
        pairs = {
            str(name): (as_float(pair[0]), as_float(pair[1]))
            for name, pair in in_use.items()
            if isinstance(pair, list) and len(pair) == 2
        }
        reading = MemoryReading(time=as_unix_time(line.get("time")), in_use=pairs)
        if self._since_memory % self._thinning and self.memory:
            reading = _larger(self.memory.pop(), reading)
        self._since_memory += 1
        self.memory.append(reading)
        if len(self.memory) > MOST_MEMORY:
            self._thin()
        return True

    def _thin(self) -> None:
        even = self.memory[: len(self.memory) // 2 * 2]
        self.memory = [_larger(first, second) for first, second in zip(even[::2], even[1::2], strict=True)]
        self._thinning *= 2
        self._since_memory = 0


class RunReader:
    """`refresh` reads what is new in a run's files into `data`."""

    def __init__(self, paths: RunPaths, data: RunData | None = None) -> None:
        """`data`: what takes the lines, in place of a RunData of its own."""
        self.data = RunData() if data is None else data
        # The ledger before the metrics, which are written after it: each step of the ledger then has its metrics. The
        # events after both: whatever happened before a step that was read is then read too.
        self._follower = FileFollower(
            (
                (paths.ledger, self.data.take_ledger),
                (paths.metrics, self.data.take_step),
                (paths.events, self.data.take_event),
                (paths.memory, self.data.take_memory),
            )
        )

    def refresh(self, *, has_ended: bool = False) -> int:
        """How many lines were new. `has_ended`: nobody writes any more."""
        count = self._follower.refresh(has_ended=has_ended)
        self.data.not_read = self._follower.not_read()
        return count


def incident_folders(paths: RunPaths) -> frozenset[int]:
    """Numbers of the incidents that have a folder."""
    return frozenset(int(path.name) for path in _folder(paths.incidents) if path.name.isdigit())


def _folder(path: Path) -> Iterator[Path]:
    try:
        yield from path.iterdir()
    except OSError:  # none yet
        return


def _names(ids: object) -> list[str]:
    """Each epoch names the same prompts: one string for all."""
    return [sys.intern(one) if isinstance(one, str) else str(one) for one in ids] if isinstance(ids, list) else []


def _larger(first: MemoryReading, second: MemoryReading) -> MemoryReading:
    in_use = dict(first.in_use)
    for name, pair in second.in_use.items():
        in_use[name] = max(in_use.get(name, pair), pair)
    return MemoryReading(time=first.time, in_use=in_use)
