"""Turns records around a log's lines into the lines: JSON of containers, journald's exports, the kernel's own dates.

A line keeps the date that its program wrote. Only where the programs write none, and before a line of the kernel, the
record's own date is put before it, with its zone, where the record has one.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import chain, islice
from typing import IO

from launcher.diagnosis.reading.log_clock import STAMP, say_utc

TEXT_KEYS = ("log", "MESSAGE", "message", "msg", "textPayload", "line", "body")
TIME_KEYS = ("__REALTIME_TIMESTAMP", "time", "timestamp", "@timestamp", "ts")
OURS = ("event", "global_step")
LOOKED_AT = 200
"""Records in which a date of the program's own is looked for."""
ZONES_S = 86_400
"""The clocks of two zones differ by at most a day: of a file changed today, a line may be of tomorrow."""
MONTHS = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
MONTH = rb"(?P<month>" + b"|".join(MONTHS) + rb") +(?P<day>\d+) (?P<clock>\d\d:\d\d:\d\d)"
DMESG = re.compile(rb"^\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + MONTH + rb" (?P<year>20\d\d)\] ?", re.MULTILINE)
SYSLOG = re.compile(rb"^" + MONTH + rb" (?=\S+ kernel: )", re.MULTILINE)

Lines = Callable[[IO[bytes]], Iterator[bytes]]
Record = tuple[str, str, bool]
"""Its date, its text as it was written, and whether the kernel wrote it."""


def find_wrapping(head: bytes, changed: float) -> Lines | None:
    """What takes the lines out of a file that begins like this; None where it holds plain ones. `changed`: when the
    file was written last, unix seconds: dates without a year are no later, in any zone."""
    first = head.lstrip().split(b"\n", 1)[0]
    if first.startswith(b"__CURSOR="):
        return lambda file: _lines_of(_exported(file))
    if first.startswith(b"{") and (record := _parsed(first)) is not None and not any(key in record for key in OURS):
        return (lambda file: _lines_of(map(_record_of, file))) if _text_of(record) is not None else None
    if DMESG.search(head):
        return partial(_redated, DMESG, changed)
    return partial(_redated, SYSLOG, changed) if SYSLOG.search(head) else None


# ── records ──


def _lines_of(records: Iterable[Record]) -> Iterator[bytes]:
    records = iter(records)
    first = list(islice(records, LOOKED_AT))
    has_own_dates = any(STAMP.search(text.encode()) for _, text, _ in first)
    has_ends = any(text.endswith("\n") for _, text, _ in first)  # a container's line that is cut into parts has none
    is_begin = True
    for date, text, is_kernels in chain(first, records):
        begin = f"{date} " if date and is_begin and (is_kernels or not has_own_dates) else ""
        begin += "kernel: " if is_kernels else ""
        yield f"{begin}{text}{'' if has_ends else chr(10)}".encode()
        is_begin = not has_ends or text.endswith("\n")


def _parsed(line: bytes) -> Mapping[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _text_of(record: Mapping[str, object]) -> str | None:
    for key in TEXT_KEYS:
        match record.get(key):
            case str(text):
                return text
            case list(numbers) if key == "MESSAGE" and all(isinstance(n, int) and 0 <= n < 256 for n in numbers):
                return bytes(numbers).decode("utf-8", "replace")  # journald's, of what is no UTF-8
    return None


def _record_of(line: bytes) -> Record:
    """A line that is no record, such as a torn one, is its own text."""
    record = _parsed(line)
    text = None if record is None else _text_of(record)
    if record is None or text is None:
        return "", line.decode("utf-8", "replace"), False
    is_kernels = record.get("_TRANSPORT") == "kernel" or record.get("SYSLOG_IDENTIFIER") == "kernel"
    return _date_of(next((record[key] for key in TIME_KEYS if key in record), "")), text, is_kernels


def _date_of(value: object) -> str:
    """From a date of RFC 3339, microseconds (journald's) or seconds; "" where it is none of these."""
    text = str(value)
    try:
        number = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            return ""
        return f"{date:%Y-%m-%d %H:%M:%S}" if date.tzinfo is None else say_utc(date.timestamp())
    seconds = number / 1e6 if number > 1e14 else number / 1e3 if number > 1e11 else number
    return say_utc(seconds) if 1e8 < seconds < 1e11 else ""


def _exported(file: IO[bytes]) -> Iterator[Record]:
    """`journalctl -o export` (systemd.io/JOURNAL_EXPORT_FORMATS): `KEY=value` lines, or a key, a length of 8 bytes and
    the value; an empty line ends a record."""
    fields: dict[str, str] = {}
    for line in chain(file, (b"\n",)):
        key, mark, value = line.rstrip(b"\n").partition(b"=")
        if not line.strip():
            if "MESSAGE" in fields:
                is_kernels = fields.get("_TRANSPORT") == "kernel"
                yield _date_of(fields.get("__REALTIME_TIMESTAMP", "")), fields["MESSAGE"], is_kernels
            fields = {}
            continue
        if not mark:
            size = file.read(8)
            value = file.read(struct.unpack("<Q", size)[0]) if len(size) == 8 else b""
            file.readline()
        fields[key.decode("ascii", "replace")] = value.decode("utf-8", "replace")


# ── the kernel's dates ──


def _redated(pattern: re.Pattern[bytes], changed: float, file: IO[bytes]) -> Iterator[bytes]:
    newest = time.gmtime(changed + ZONES_S)

    def date(found: re.Match[bytes]) -> bytes:
        month, day = MONTHS.index(found["month"]) + 1, int(found["day"])
        is_later = (month, day) > (newest.tm_mon, newest.tm_mday)
        year = int(found["year"]) if "year" in pattern.groupindex else newest.tm_year - is_later
        return b"%04d-%02d-%02d %s " % (year, month, day, found["clock"])

    return (pattern.sub(date, line) for line in file)
