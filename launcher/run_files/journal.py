"""Writes and reads the run's append-only records: metrics.jsonl, ledger.jsonl and events.jsonl (docs/files.md).

One JSON object a line, each appended by one write, so that driver, trainer and servers may share a file and a crash
can tear the last line only. JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and
"-Infinity", which `float()` reads back, so that a line stays JSON for every reader and still shows which it was.

A full disk must not end a run that is learning. `append_line` raises JournalError; `LineLog` and `Journal` never
raise for the disk: they keep the lines that could not be written, report it once, and write them, in order, as soon as
there is room. What still waits when the process dies is lost, and so is only ever the end of a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from launcher.base.disk_faults import DiskFault, fault_of_file
from launcher.base.errors import JournalError

log = logging.getLogger(__name__)

LONGEST_LINE = 16 * 2**20
"""Bytes; a longer "line" is a damaged file, and reading it in one piece would take its size in memory."""

TURN_S = 0.5
MOST_WAITING = 10_000
"""Lines that a LineLog keeps while the disk is full; the oldest go first beyond that."""
MOST_UNWRITTEN = 100

Record = Mapping[str, object]


def append_line(path: Path, record: Record, *, durable: bool = False) -> None:
    """Append one record. With `durable` it is on the disk, not only in the page cache, on return.

    Raises JournalError naming the file. What was written of the record is then taken back, so that a second try writes
    it once; only where others wrote at the same moment may it be there, torn or complete.
    """
    try:
        _append(path, encode(record), durable=durable)
    except OSError as error:
        raise JournalError(
            f"{path} can't be written: {error.strerror or error}", "make room on its disk, or check its permissions"
        ) from error


def _append(path: Path, data: bytes, *, durable: bool) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        is_alone = _take_turn(fd)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # torn by a crash: without this, two records would share a line and both be lost
        written = os.write(fd, data)
        try:
            if written != len(data):
                raise OSError(errno.ENOSPC, "No space left for the complete line")
            if durable:
                os.fsync(fd)
        except OSError:
            if is_alone:
                _take_back(fd, size, written)
            raise
    finally:
        os.close(fd)


def _take_back(fd: int, size: int, written: int) -> None:
    """Else a line whose sync failed, or that lacks its end alone, would be there twice after the next try. Not where
    somebody wrote after it: theirs would be lost."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_size == size + written:
            os.ftruncate(fd, size)


def _take_turn(fd: int) -> bool:
    """One writer at a time: on a network file system two machines that append at once may write over each other.
    Returns whether it was granted.

    Not for long, and not at any price: one that was stopped while it wrote must not silence all others.
    """
    give_up_at = time.monotonic() + TURN_S
    while time.monotonic() < give_up_at:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
            return True
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:  # a file system without locks
            return False
    return False


def encode(record: Record) -> bytes:
    """The record as one line of JSON, whatever its values are: a metric must never end a run."""
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: object) -> object:
    """`value` in JSON's own types; what has no JSON form as its text."""
    match value:
        case None | bool():
            return value
        case enum.Enum():
            return plain(value.value)
        case str():
            return str(value)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else _nonfinite(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    if callable(item := getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
        return plain(item())  # a numpy scalar
    return str(value)


def _nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number_of(value: object, otherwise: float = math.nan) -> float:
    """A number as it is written here, NaN and the infinities as strings; `otherwise` where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else otherwise
    except (ValueError, OverflowError):  # no number; an integer that no float holds
        return otherwise


class Lines:
    """The records of a file, streamed. A torn line is passed over and counted, never an error.

    `skipped` and `first_skipped` (line number and why) are complete once the iteration has ended. A missing file
    has no lines: a run's first reader comes before its first writer. One that can't be read raises JournalError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self.first_skipped = ""

    def __iter__(self) -> Iterator[dict[str, object]]:
        self.skipped, self.first_skipped = 0, ""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalError(f"{self.path} can't be read: {error.strerror}", "check its permissions") from error
        with file:
            for number, line in enumerate(_raw_lines(file.readline), 1):
                record, why_none = parse_line(line)
                if record is not None:
                    yield record
                elif why_none:
                    self.skipped += 1
                    self.first_skipped = self.first_skipped or f"line {number}: {why_none}"


def parse_line(line: bytes) -> tuple[dict[str, object] | None, str]:
    """The record in a line; or None, and why it is none, "" of an empty one."""
    try:
        record = orjson.loads(line)  # an eighth of json's time
    except ValueError:
        try:
            record = json.loads(line)  # NaN, and half a surrogate pair, which other programs write
        except (ValueError, RecursionError) as error:  # a line of brackets, nested deeper than any parser goes
            return None, "" if line.isspace() else str(error)
    return (record, "") if isinstance(record, dict) else (None, "not an object")


def _raw_lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while line := readline(LONGEST_LINE):
        yield line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):  # the rest of an overlong one belongs to it
            line = readline(LONGEST_LINE)


def read_lines(path: Path) -> Lines:
    """Iterate over a file's records; ask the returned object for what was `skipped`."""
    return Lines(path)


def last_of(path: Path, event: str, attempt: int) -> Record:
    """The last event of that name in an attempt; empty where there is none."""
    found: Record = {}
    for line in read_lines(path):
        if line.get("event") == event and line.get("attempt") == attempt:
            found = line
    return found


def current_lines(records: Iterable[Record]) -> list[Record]:
    """The records, one for each global_step in order, that make up the weights as they are now.

    A restore to step g repeats g + 1 and on, so of each step the last line is the current one. A line for step s also
    undoes what was written before it for later steps: those were trained on weights that the restore threw away,
    and the run may end before it reaches them again. Records without a global_step are passed over.
    """
    standing: list[tuple[int, Record]] = []
    for record in records:
        step = record.get("global_step")
        if not isinstance(step, int):
            continue
        while standing and standing[-1][0] >= step:
            standing.pop()
        standing.append((step, record))
    return [record for _, record in standing]


class LineLog:
    """One file that only grows, for a writer that must continue when the disk is full."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._waiting: list[Record] = []
        self._lock = threading.Lock()  # two threads would write the same waiting line twice
        self.lost = 0
        self.fault: DiskFault | None = None  # of the disk, at the last try

    @property
    def waiting(self) -> int:
        """Records that are not on the disk yet."""
        return len(self._waiting)

    def newest_waiting(self, most: int) -> tuple[Record, ...]:
        return tuple(self._waiting[-most:])

    def append(self, record: Record) -> bool:
        """Write what waits, then `record`. False where the disk refused; it is tried again at the next append."""
        with self._lock:
            was_behind = bool(self._waiting)
            self._waiting.append(dict(record))
            if len(self._waiting) > MOST_WAITING:
                self._waiting.pop(0)
                self.lost += 1
            return self._write(was_behind)

    def flush(self) -> bool:
        """Write what waits; True when nothing does any more."""
        with self._lock:
            return not self._waiting or self._write(True)

    def _write(self, was_behind: bool) -> bool:
        try:
            while self._waiting:
                append_line(self.path, self._waiting[0], durable=self._durable)
                self._waiting.pop(0)
        except JournalError as error:
            self.fault = fault_of_file(error)
            if not was_behind:  # logged when it changes, not at every line
                log.warning("%s; the lines wait in memory until there is room", error)
            return False
        self.fault = None
        if was_behind and self.lost:
            log.warning("%s is written again; %d lines were lost", self.path, self.lost)
        elif was_behind:
            log.warning("%s is written again; no line was lost", self.path)
        return True


class Journal:
    """Writes events.jsonl: what happened, to which subject, and why. Never raises for the disk (see LineLog)."""

    def __init__(
        self, path: Path, attempt: int, clock: Callable[[], float] = time.time, *, in_background: bool = False
    ) -> None:
        """`clock` gives unix seconds. `in_background`: one thread writes, in order, so that a disk that stalls does not
        stall the caller's loop; what must be on the disk before something else is done waits for `flush`."""
        self._lines = LineLog(path, durable=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal") if in_background else None
        self._pending: list[tuple[Future[bool], dict[str, object]]] = []
        self._following: list[Future[None]] = []
        self.attempt = attempt
        self._clock = clock

    @property
    def path(self) -> Path:
        return self._lines.path

    def record(
        self,
        event: str,
        /,
        *,
        subject: str = "",
        reason: str = "",
        global_step: int | None = None,
        incident: int | str | None = None,
        **facts: object,
    ) -> dict[str, object]:
        """Append one event, dotted (`server.died`), and return it as it was written.

        `monotonic`, in seconds, is the clock that all processes of one host share, and nobody sets.
        `facts` are figures such as pid or exit_code. One that bears the name of a head field goes under `fact.<name>`.
        """
        head: dict[str, object] = {
            "time": self._clock(),
            "monotonic": time.monotonic(),
            "event": event,
            "attempt": self.attempt,
            "subject": subject,
            "reason": reason,
            "global_step": global_step,
            "incident": incident,
        }
        line = head | {(f"fact.{name}" if name in head else name): value for name, value in facts.items()}
        if self._writer is None:
            self._lines.append(line)
        else:
            self._pending = [one for one in self._pending if not one[0].done() or one[0].exception()]
            self._pending.append((self._writer.submit(self._lines.append, line), line))
        return line

    def unwritten(self) -> tuple[Record, ...]:
        """The newest events that the disk has not taken yet."""
        queued = [line for write, line in self._pending if not write.done()]
        waiting = self._lines.newest_waiting(MOST_UNWRITTEN)
        return tuple([*waiting, *(line for line in queued if line not in waiting)][-MOST_UNWRITTEN:])

    def write_waiting(self) -> None:
        """Try again to write what waits: without it, the next event would."""
        if self._writer is None:
            self._lines.flush()
        elif self._lines.waiting and all(write.done() for write, _ in self._pending):
            self._writer.submit(self._lines.flush)

    def then(self, work: Callable[[], None]) -> None:
        """Do `work`, which must not raise, behind everything recorded so far."""
        if self._writer is None:
            work()
        else:
            self._following = [one for one in self._following if not one.done()]
            self._following.append(self._writer.submit(work))

    async def flush(self) -> None:
        """Returns when everything recorded so far is on the disk, or was refused by it, and `then` has been done."""
        waits: list[Future[Any]] = [*(write for write, _ in self._pending), *self._following]
        for one in waits:
            await asyncio.shield(asyncio.wrap_future(one))  # a caller that gives up must not take the line with it
