"""Reads one text log, of AReaL's or ours: its steps, and the events between them.

Lines are picked and classified within Arrow (line_reader.py); Python sees the first and the last line of each kind in
each step, so that an hour of refused connections costs as little as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from launcher.base.errors import DataError
from launcher.checkpoints.areal_log import ANY_STEP_LINE, read_step, unfinished
from launcher.diagnosis.reading.line_reader import Ints, LineBlock, read_blocks
from launcher.diagnosis.reading.log_clock import HEAD, SEARCHED_BEFORE, STAMP, LogClock
from launcher.diagnosis.reading.log_patterns import (
    ANY,
    DATED,
    GROUP,
    KINDS,
    OF_A_RUN,
    REQUEST,
    ROLE_PREFIX,
    SERVER_ROLES,
    facts_of,
    plain,
    without_head,
)
from launcher.diagnosis.reading.log_records import (
    FAILED,
    KILLS,
    Contents,
    FigureNames,
    Kind,
    LogEvent,
    Role,
    Source,
    Steps,
)
from launcher.diagnosis.reading.server_pauses import ServerPauses

HEAD_BYTES, TAIL_BYTES = 384, 256
"""What is looked at of a line to classify it: a failed request is printed with all of its tokens."""
BEFORE_BYTES, AFTER_BYTES = 24 * 1024, 2 * 1024
"""Around a line: its traceback, which shows what was being done."""
SINCE_BOOT = "its times count from the machine's start: `dmesg -T` writes dates"
MOST_DETAILED = 400
"""Events of a kind in one file whose facts are worked out, and whose date is looked for far away."""
LONGEST_TEXT = 300
TALLIES = ("lines", "records", "requests", "groups")
"""Of failures: all lines, those with a date, requests given up, groups dropped."""

FIRST_KINDS = (*FAILED, Kind.KILLED_FOR_MEMORY, Kind.OUT_OF_MEMORY)
"""A line is of one kind, the first that fits: these come first because a failing log has millions of them, except
the last two, which explain whatever else their line contains."""
ORDER = (*FIRST_KINDS, *(kind for kind in KINDS if kind not in FIRST_KINDS))


class LogFile:
    """Takes the blocks of a file and collects its contents."""

    def __init__(self, path: Path, names: FigureNames) -> None:
        self._path = path
        self._names = names
        self._role = role_of_name(path.name)
        self._may_serve = self._role in (Role.SERVER, Role.UNKNOWN)
        self._steps = Steps()
        self._keys: set[str] = set()
        self._log_events: list[LogEvent] = []
        self._counts: Counter[Kind] = Counter()
        self._failed: dict[tuple[Kind, int | None], tuple[int, Counter[str]]] = {}
        self._clock = LogClock()
        self._pauses = ServerPauses(path.name, self._clock)
        self._first_time: float | None = None
        self._last_time: float | None = None
        self.known_lines = 0
        self.total_steps = 0

    def take_block(self, block: LineBlock) -> None:
        """Collect from a block; no step's tables continue beyond it."""
        self._clock.note_dates(block.data)
        steps = block.matching(block.picked, ANY_STEP_LINE)
        bounds = [int(block.starts[number]) for number in steps] + [len(block.data)]
        befores = [self._steps.last_step]
        for index, number in enumerate(steps):
            table = read_step(block.data, bounds[index], bounds[index + 1])
            if table is not None:
                self._add_step(block, int(number), table.global_step, table.values)
                self.total_steps = max(self.total_steps, table.total_steps)
            befores.append(self._steps.last_step)
        rest = np.setdiff1d(block.picked, steps, assume_unique=True)
        self._add_log_events(block, rest, steps, befores)
        self._look_at_times(block)
        self.known_lines += len(block.picked)

    def _add_step(self, block: LineBlock, number: int, global_step: int, values: dict[str, float]) -> None:
        time = self._clock.stamp_in(block.data, int(block.starts[number]), int(block.ends[number]))
        if len(self._keys) < 1000:
            self._keys.update(values)
        self._steps.append(global_step, time, self._names.pick(values))
        if self._role is Role.UNKNOWN:
            self._role = Role.TRAINER

    def _add_log_events(self, block: LineBlock, rest: Ints, steps: Ints, befores: list[int | None]) -> None:
        for kind, numbers in _by_kind(block, rest).items():
            places = np.searchsorted(steps, numbers)
            is_each = kind in KILLS and self._counts[kind] < MOST_DETAILED
            _, firsts, counts = np.unique(numbers if is_each else places, return_index=True, return_counts=True)
            records, requests, groups = (
                np.add.reduceat(np.isin(numbers, block.matching(numbers, pattern)), firsts, dtype=np.int64)
                for pattern in (DATED, REQUEST, GROUP)
            )
            for at, (first, lines) in enumerate(zip(firsts, counts, strict=True)):
                ends = (int(numbers[first]), int(numbers[first + lines - 1]))
                event = self._log_event(block, kind, ends, int(lines), befores[places[first]])
                if kind in FAILED:
                    numbers_of = (int(lines), int(records[at]), int(requests[at]), int(groups[at]))
                    self._add_failed(event, Counter(dict(zip(TALLIES, numbers_of, strict=True))))
                else:
                    self._log_events.append(event)

    def _add_failed(self, event: LogEvent, tally: Counter[str]) -> None:
        """A step's failures are one event also where a block ends among them."""
        key, index = (event.kind, event.after_step), len(self._log_events)
        if event.after_step is not None and key in self._failed:
            index, before = self._failed[key]
            tally += before
            event = replace(self._log_events.pop(index), last_time=event.last_time)
        count = tally["records"] or tally["lines"]
        self._log_events.insert(index, replace(event, count=count, facts={**event.facts, **tally}))
        self._failed[key] = index, tally

    def _log_event(
        self, block: LineBlock, kind: Kind, ends: tuple[int, int], count: int, after_step: int | None
    ) -> LogEvent:
        self._counts[kind] += 1
        is_detailed = self._counts[kind] <= MOST_DETAILED
        line, text, facts = block.line(ends[0]), "", dict[str, object]()
        if is_detailed:
            start, end = int(block.starts[ends[0]]), int(block.ends[ends[0]])
            text = without_head(plain(line[:LONGEST_TEXT]))
            facts = facts_of(kind, line, block.data[max(0, start - BEFORE_BYTES) : end + AFTER_BYTES])
        role = self._role_of(line)
        if kind is Kind.KILLED_FOR_MEMORY and is_detailed:
            kind, role = _of_kill(str(facts["process"]))
        return LogEvent(
            kind=kind,
            role=role,
            count=count,
            time=self._time_of(block, ends[0], far=is_detailed),
            last_time=self._time_of(block, ends[1], far=is_detailed),
            after_step=after_step,
            text=text,
            where=f"{self._path.name}:{block.first_line + ends[0]}",
            facts=facts,
        )

    def _role_of(self, line: bytes) -> Role:
        match = ROLE_PREFIX.match(line)
        return self._role if match is None else role_of_name(match[1].decode("utf-8", "replace"))

    def _time_of(self, block: LineBlock, number: int, *, far: bool) -> float | None:
        start, end = int(block.starts[number]), int(block.ends[number])
        time = self._clock.stamp_in(block.data, start, min(end, start + HEAD))
        for reach in SEARCHED_BEFORE[: 2 if far else 1]:
            if time is None:
                time = self._clock.stamp_before(block.data, start, reach)
        return self._last_time if time is None else time

    def _look_at_times(self, block: LineBlock) -> None:
        first = self._clock.stamp_in(block.data, 0, SEARCHED_BEFORE[1])
        last = self._clock.stamp_before(block.data, len(block.data), SEARCHED_BEFORE[1])
        if self._first_time is None:
            self._first_time = first if first is not None else last
        self._last_time = last if last is not None else self._last_time
        if self._may_serve:
            self._pauses.take_bytes(block.data)

    def contents(self, size: int) -> Contents:
        """Everything collected, once all blocks were taken."""
        role, pauses = self._role, self._pauses.found(self._last_time)
        if len(self._steps):  # the trainer writes into it too: a server's silence can't be seen
            pauses = [pause for pause in pauses if pause.kind is Kind.NO_TOKENS]
        if role is Role.UNKNOWN and self._pauses.makes_tokens:
            role = Role.SERVER
        if role is Role.UNKNOWN and self._log_events and all(event.kind in KILLS for event in self._log_events):
            role = Role.KERNEL
        source = Source(
            path=str(self._path),
            what="log",
            role=role,
            bytes=size,
            steps=len(self._steps),
            first_time=self._first_time,
            last_time=self._last_time,
            note=SINCE_BOOT if role is Role.KERNEL and self._last_time is None else "",
        )
        return Contents(
            steps=self._steps,
            log_events=(*self._log_events, *pauses),
            sources=(source,),
            keys=tuple(sorted(self._keys)),
            total_steps=self.total_steps,
            scale=self._clock.scale(),
        )


def read_log(path: Path, names: FigureNames, on_progress: Callable[[int], None] = lambda done: None) -> Contents:
    """Raises DataError where nothing in it looks like AReaL's, SGLang's or ours: no line, no table, no date."""
    log, size = LogFile(path, names), path.stat().st_size
    for block, done in read_blocks(path, ANY, unfinished):
        log.take_block(block)
        on_progress(done)
    contents = log.contents(size)
    if not log.known_lines and contents.sources[0].role is not Role.SERVER and not _has_dates(path):
        raise DataError(
            f"{path} is no log of AReaL, SGLang or this launcher: no date, step or known word in its {size:,} bytes",
            "give trainer.log, llm_server.log, merged.log, a WandB export (.csv) or a .wandb file",
        )
    return contents


def _has_dates(path: Path) -> bool:
    """At its beginning, as each of these programs writes them."""
    with path.open("rb") as file:
        return STAMP.search(file.read(2**20)) is not None


def role_of_name(name: str) -> Role:
    """Whose file it is, by its name; or whose line, by its role in merged.log."""
    lowered = name.lower()
    if any(part in lowered for part in SERVER_ROLES):
        return Role.SERVER
    if re.search(r"dmesg|\bkern|syslog|^messages", lowered):
        return Role.KERNEL
    return Role.TRAINER if re.search(r"train|actor|main|master|controller", lowered) else Role.UNKNOWN


def _of_kill(process: str) -> tuple[Kind, Role]:
    """Whether a program that the kernel killed may be the run's, and whose it is, as far as its name says."""
    if process and not OF_A_RUN.match(process):
        return Kind.OTHER_KILLED, Role.UNKNOWN
    return Kind.KILLED_FOR_MEMORY, role_of_name(process) if "::" in process else Role.UNKNOWN


def _by_kind(block: LineBlock, numbers: Ints) -> dict[Kind, Ints]:
    """The lines by their content, each line once."""
    found: dict[Kind, Ints] = {}
    if not len(numbers):
        return found
    lines = _ends_of(block.lines.take(pa.array(numbers)))
    for kind in ORDER:
        if not len(numbers):
            break
        mask = pc.match_substring_regex(lines, pattern=KINDS[kind]).to_numpy(zero_copy_only=False)
        if mask.any():
            found[kind] = numbers[mask]
            numbers = numbers[~mask]
            lines = lines.filter(pa.array(~mask))
    return found


def _ends_of(lines: pa.Array) -> pa.Array:
    """The lines without the middle of long ones."""
    lengths = pc.binary_length(lines)
    if (pc.max(lengths).as_py() or 0) <= HEAD_BYTES + TAIL_BYTES:
        return lines
    is_long = pc.greater(lengths, HEAD_BYTES + TAIL_BYTES)
    head, tail = pc.binary_slice(lines, 0, HEAD_BYTES), pc.binary_slice(lines, -TAIL_BYTES)
    short = pc.binary_join_element_wise(head, tail, b" ")
    return pc.if_else(is_long, short, lines)
