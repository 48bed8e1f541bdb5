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
from collections import deque
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

TAIL_WINDOW = 256 * 1024
"""Bytes at the end of a file that are looked through first."""

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


class LineTail:
    """The records that others append to a file, from where the last `read` ended. A torn line is passed over and
    counted, never an error."""

    def __init__(self, path: Path, *, since: int = 0) -> None:
        """`since`: the byte to begin at; the line that it falls into is passed over, and not counted."""
        self.path = path
        self.skipped = 0
        self.first_skipped = ""  # its number, and why; "" where `since` leaves the number unknown
        self._offset = since
        self._number = 0
        self._is_numbered = since == 0
        self._begins_within = since > 0
        self._is_rest = False  # of an overlong line, which belongs to it

    def read(self, *, has_ended: bool = False) -> Iterator[dict[str, object]]:
        """`has_ended`: nobody writes any more, so that a last line without its end is all that will ever be there."""
        with contextlib.suppress(OSError):  # not there yet, or not readable now: it is tried again
            yield from self.read_or_fail(has_ended=has_ended)

    def read_or_fail(self, *, has_ended: bool) -> Iterator[dict[str, object]]:
        """As `read`; raises OSError where the file can't be read."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE and not has_ended:
                    return  # still being written: from here again next time
                self._offset += len(line)
                is_rest = self._is_rest
                self._is_rest = not line.endswith(b"\n")
                if is_rest:
                    continue
                self._number += 1
                record, why_none = parse_line(line)
                if record is not None:
                    yield record
                elif why_none and not self._begins_within:
                    self.skipped += 1
                    if self._is_numbered:
                        self.first_skipped = self.first_skipped or f"line {self._number}: {why_none}"
                self._begins_within = False


class Lines:
    """All records of a file, each time from its beginning. A torn line is passed over and counted, never an error.

    `skipped` and `first_skipped` (line number and why) are those of the last iteration that ended. A missing file
    has no lines: a run's first reader comes before its first writer. One that can't be read raises JournalError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self.first_skipped = ""

    def __iter__(self) -> Iterator[dict[str, object]]:
        tail = LineTail(self.path)
        try:
            yield from tail.read_or_fail(has_ended=True)
        except (FileNotFoundError, NotADirectoryError):  # of the second kind is a fileroot that is a file
            pass
        except OSError as error:
            raise JournalError(f"{self.path} can't be read: {error.strerror}", "check its permissions") from error
        self.skipped = tail.skipped
        self.first_skipped = tail.first_skipped


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


def read_lines(path: Path) -> Lines:
    """Iterate over a file's records; ask the returned object for what was `skipped`."""
    return Lines(path)


def read_events(path: Path) -> Iterator[Record]:
    """Those of a file's records that are events; another program's have no name."""
    return (line for line in read_lines(path) if isinstance(line.get("event"), str))


def last_of(path: Path, event: str, attempt: int) -> Record:
    """The last event of that name in an attempt; empty where there is none. For a driver that looks for one of its own
    attempt: the fold keeps no event of each name."""
    found: Record = {}
    for line in read_lines(path):
        if line.get("event") == event and line.get("attempt") == attempt:
            found = line
    return found


def current_lines(records: Iterable[Record]) -> list[Record]:
    """The records, one for each global_step in order, that make up the weights as they are now.

    A restore to step g repeats g + 1 and on, so of each step the last line is the current one. A line for step s also
    undoes what was written before it for later steps: those were trained on weights that the restore threw away,
    and the run may end before it reaches them again. Records without a global_step are passed over. The audit's rule,
    of the ledger and of the steps alike and without the journal: what stands by the journal too, RunLog says.
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


def last_lines(path: Path) -> Iterable[Record]:
    """Those in the last TAIL_WINDOW bytes of a file; none where there is no file."""
    size = path.stat().st_size if path.exists() else 0
    return LineTail(path, since=max(0, size - TAIL_WINDOW)).read(has_ended=True)


def newest_line(path: Path) -> Mapping[str, object]:
    """The last line of a file; empty where there is none."""
    return next(iter(deque(last_lines(path), maxlen=1)), {})


def current_line(path: Path, step: int) -> Mapping[str, object] | None:
    """The line that is current for a step (`current_lines`), searched from the end of the file: a restored
    trainer asks for one of the last, and a run of 100,000 steps would take 0.3 GB of its memory."""
    size, window = path.stat().st_size if path.exists() else 0, TAIL_WINDOW
    while True:
        for line in reversed(list(LineTail(path, since=max(0, size - window)).read(has_ended=True))):
            known = line.get("global_step")
            if isinstance(known, int) and known <= step:
                return line if known == step else None
        if window >= size:
            return None
        window *= 8


class LineLog:
    """One file that only grows, for a writer that must continue when the disk is full."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self.lost = 0
        self.fault: DiskFault | None = None  # of the disk, at the last try
        self._durable = durable
        self._waiting: deque[Record] = deque()
        self._listing = threading.Lock()  # of `_waiting`; not held by a write: a stalled disk would stall who records
        self._writing = threading.Lock()  # two threads would write the same waiting line twice

    @property
    def waiting(self) -> int:
        """Records that are not on the disk yet."""
        return len(self._waiting)

    def newest_waiting(self, most: int) -> tuple[Record, ...]:
        with self._listing:
            return tuple(self._waiting)[-most:]

    def append(self, record: Record) -> bool:
        """Write what waits, then `record`. False where the disk refused; it is tried again at the next append."""
        self.add(record)
        return self.flush()

    def add(self, record: Record) -> None:
        """To what waits, whatever the disk does."""
        with self._listing:
            self._waiting.append(dict(record))
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self.lost += 1

    def flush(self) -> bool:
        """Write what waits; True when nothing does any more."""
        with self._writing:
            try:
                while self._waiting:
                    record = self._waiting[0]
                    append_line(self.path, record, durable=self._durable)
                    with self._listing:
                        if self._waiting[0] is record:
                            self._waiting.popleft()
                        else:  # it made room for a newer one while it was written
                            self.lost -= 1
            except JournalError as error:
                if self.fault is None:  # logged when it changes, not at every line
                    log.warning("%s; the lines wait in memory until there is room", error)
                self.fault = fault_of_file(error)
                return False
            if self.fault is not None:
                lost = f"{self.lost} lines were lost" if self.lost else "no line was lost"
                log.warning("%s is written again; %s", self.path, lost)
            self.fault = None
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
        self._written: Future[Any] | None = None  # the last order to the writer, which takes them in order
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
        self._lines.add(line)
        self._write()
        return line

    def unwritten(self) -> tuple[Record, ...]:
        """The newest events that the disk has not taken yet."""
        return self._lines.newest_waiting(MOST_UNWRITTEN)

    def write_waiting(self) -> None:
        """Try again to write what waits: without it, the next event would."""
        if self._lines.waiting and (self._written is None or self._written.done()):
            self._write()

    def _write(self) -> None:
        if self._writer is None:
            self._lines.flush()
        else:
            self._written = self._writer.submit(self._lines.flush)

    def then(self, work: Callable[[], None]) -> None:
        """Do `work`, which must not raise, behind everything recorded so far."""
        if self._writer is None:
            work()
        else:
            self._written = self._writer.submit(work)

    async def flush(self) -> None:
        """Returns when everything recorded so far is on the disk, or was refused by it, and `then` has been done."""
        if self._written is not None:
            # shielded: a caller that gives up must not take the line with it
            await asyncio.shield(asyncio.wrap_future(self._written))
