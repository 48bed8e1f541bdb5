"""Reads the files of a run line by line as they grow, and keeps as little of them as the report needs.

    metrics.jsonl ─► steps      ledger.jsonl ─► ledger      events.jsonl ─► events      memory.jsonl ─► memory

Nothing is judged here: launcher/reporting/run_facts.py does that, from all of it, each time.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.base.wording import lines_not_read
from launcher.reporting.figures import Figures
from launcher.reporting.ledger_audit import DISTANCE
from launcher.reporting.line_values import as_float, as_integer, as_unix_time
from launcher.reporting.run_view import REWARD, TOKENS_PER_S
from launcher.run_files.journal import Record
from launcher.run_files.line_tail import LineTail
from launcher.run_files.run_paths import RunPaths

TIMES = "timeperf/"
SECONDS = re.compile(f"{TIMES}(.+)_s")
KEPT_EVENTS = ("run.", "incident.", "trainer.", "checkpoint.", "eval.", "memory.", "batch.", "server.died")
"""Events of these beginnings are kept. Probes, loads and verdicts of health are many, and the page shows none."""
MOST_MEMORY = 4000
"""Readings kept; beyond that the larger of two neighbours stays, so that no peak is lost."""
LONGEST_TEXT = 2000
METRICS, LEDGER, EVENTS, MEMORY = "metrics.jsonl", "ledger.jsonl", "events.jsonl", "memory.jsonl"
TEXTS = frozenset({"event", "subject", "reason", "cause", "doing", "state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of metrics.jsonl. Figures are NaN where it has none; `time` is unix seconds, 0 where it is unknown.
    `number`: of lines before it. `lineage`: restores of its attempt before it, None where it does not say.

    `seconds` are the metrics `timeperf/{name}_s` by their names.
    """

    step: int
    attempt: int
    time: float
    reward: float
    tokens: float
    tokens_per_s: float
    seconds: Mapping[str, float]
    distance: float
    number: int
    lineage: int | None = None
    epoch: int | None = None

    @property
    def step_s(self) -> float:
        return self.seconds.get("step", math.nan)

    @property
    def head(self) -> Record:
        """The fields that say where it belongs among the events (launcher/run_files/run_order.py)."""
        return {"global_step": self.step, "attempt": self.attempt, "lineage": self.lineage, "time": self.time}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes used and bytes there are, by name."""

    time: float
    in_use: Mapping[str, tuple[float, float]]


class RunData:
    """All attempts of a run. Lines come in the order of their files."""

    def __init__(self) -> None:
        self.steps: list[StepLine] = []
        self.figures = Figures()
        self.ledger: list[Record] = []
        self.events: list[Record] = []
        self.memory: list[MemoryReading] = []
        self.rollouts_failed = self.rollouts_retried = 0
        self.foreign: Counter[str] = Counter()
        """Objects that are not what their file holds, by its name."""
        self.not_read: tuple[str, ...] = ()
        self._since_memory = 0
        self._thinning = 1

    def take_step(self, line: Record) -> None:
        step = as_integer(line.get("global_step"))
        if step is None:
            self.foreign[METRICS] += 1
            return
        self.steps.append(
            StepLine(
                step=step,
                attempt=as_integer(line.get("attempt")) or 0,
                time=as_unix_time(line.get("time")),
                reward=as_float(line.get(REWARD)),
                tokens=as_float(line.get("rollout/tokens")),
                tokens_per_s=as_float(line.get(TOKENS_PER_S)),
                seconds={
                    match[1]: as_float(line[key])
                    for key in line
                    if key.startswith(TIMES) and (match := SECONDS.fullmatch(key))
                },
                distance=as_float(line.get(DISTANCE)),
                number=len(self.steps),
                lineage=as_integer(line.get("lineage")),
                epoch=as_integer(line.get("epoch")),
            )
        )
        self.figures.add(step, line)

    def take_ledger(self, line: Record) -> None:
        step, versions = as_integer(line.get("global_step")), line.get("weight_versions")
        if step is None:
            self.foreign[LEDGER] += 1
            return
        self.rollouts_failed += as_integer(line.get("rollouts_failed")) or 0
        self.rollouts_retried += as_integer(line.get("rollouts_retried")) or 0
        known = versions if isinstance(versions, list) and all(isinstance(one, int) for one in versions) else None
        names = {key: _names(line.get(key)) for key in ("prompt_ids", "filtered_ids") if key in line}
        attempt = as_integer(line.get("attempt"))
        self.ledger.append({"global_step": step, "attempt": attempt, "weight_versions": known, **names})

    def take_event(self, line: Record) -> None:
        name = line.get("event")
        self.foreign[EVENTS] += not isinstance(name, str)
        if isinstance(name, str) and name.startswith(KEPT_EVENTS):
            self.events.append({key: _kept(key, value) for key, value in line.items() if key != "traceback"})

    def take_memory(self, line: Record) -> None:
        in_use = line.get("in_use")
        if not isinstance(in_use, dict):
            self.foreign[MEMORY] += 1
            return
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
        # The ledger before the metrics, which are written after it: each step of the ledger then has its metrics.
        self._files = (
            (LineTail(paths.events), self.data.take_event),
            (LineTail(paths.ledger), self.data.take_ledger),
            (LineTail(paths.metrics), self.data.take_step),
            (LineTail(paths.memory), self.data.take_memory),
        )

    def refresh(self, *, has_ended: bool = False) -> int:
        """How many lines were new. `has_ended`: nobody writes any more."""
        count = 0
        for tail, take in self._files:
            for line in tail.read(has_ended=has_ended):
                take(line)
                count += 1
        counts = ((tail.path, tail.skipped + self.data.foreign[tail.path.name]) for tail, _ in self._files)
        self.data.not_read = tuple(lines_not_read(number, path) for path, number in counts if number)
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


def _kept(key: str, value: object) -> object:
    """Texts are texts, whatever a damaged line has in their place, and no longer than anybody reads."""
    if key in TEXTS and value is not None:
        return str(value)[:LONGEST_TEXT]
    return value[:LONGEST_TEXT] if isinstance(value, str) else value


def _larger(first: MemoryReading, second: MemoryReading) -> MemoryReading:
    in_use = dict(first.in_use)
    for name, pair in second.in_use.items():
        in_use[name] = max(in_use.get(name, pair), pair)
    return MemoryReading(time=first.time, in_use=in_use)
