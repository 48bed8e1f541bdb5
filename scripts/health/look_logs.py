"""Connection errors in a run's logs, by kind and time: in the last LOG_BYTES of each, however large they are."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from launcher.diagnosis.health.finding import Finding
from launcher.diagnosis.health.judge_logs import ErrorsSeen, judge_errors
from scripts.health.look_run import Subject

LOG_BYTES = 32 * 2**20
BACK_BYTES = 16 * 1024
"""So far before a line without a time its time is looked for: tracebacks have one at their head."""
KINDS = {
    "connection refused": rb"Connection ?[Rr]efused|Connect call failed",
    "connection reset": rb"Connection ?[Rr]eset|reset by peer|connection broke off|Server disconnected|Broken ?pipe",
    "timed out": rb"TimeoutError|ReadTimeout|ConnectTimeout|[Tt]imed out|no answer within",
    "answer broke off": rb"answer broke off|IncompleteRead|ClientPayloadError",
    "server error (5xx)": rb'HTTP/1\.[01]" 5\d\d|\b50[0-4] (?:Internal Server Error|Bad Gateway|Service Unavailable)',
    "request given up": rb"Failed after \d+ retries each|Workflow execution failed",
}
ANY = re.compile(b"|".join(b"(%b)" % pattern for pattern in KINDS.values()))
STAMPS = (
    (re.compile(rb"^\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)", re.MULTILINE), "%Y-%m-%d %H:%M:%S"),
    (re.compile(rb"^(?:\x1b\[[0-9;]*m)*(?:\(AReaL\) )?(\d{8}-\d\d:\d\d:\d\d)", re.MULTILINE), "%Y%m%d-%H:%M:%S"),
)


def check_logs(subject: Subject) -> list[Finding]:
    found = [errors for log in sorted(subject.paths.logs.glob("*.log")) for errors in errors_in(log)]
    return judge_errors(found, now=time.time(), recent_s=subject.recent_s, is_live=subject.is_live is not False)


def errors_in(log: Path) -> Iterator[ErrorsSeen]:
    """One for each kind that occurs; a log that can't be read says so as a kind of its own."""
    try:
        text = _end(log)
    except OSError as error:
        yield ErrorsSeen(kind=f"can't be read ({error.strerror})", log=log.name, count=1, first=None, last=None)
        return
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    line_end = -1
    for match in ANY.finditer(text):
        if match.start() < line_end:  # one line is one error, of the first kind that it names
            continue
        line_end = text.find(b"\n", match.end())
        line_end = len(text) if line_end < 0 else line_end
        assert match.lastindex is not None
        kind = list(KINDS)[match.lastindex - 1]
        counts[kind] = counts.get(kind, 0) + 1
        times.setdefault(kind, []).extend(_time_of(text, match.start()))
    for kind, count in sorted(counts.items()):
        known = times[kind]
        yield ErrorsSeen(
            kind=kind, log=log.name, count=count, first=min(known, default=None), last=max(known, default=None)
        )


def _end(log: Path) -> bytes:
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - LOG_BYTES, 0))
        return file.read(LOG_BYTES)


def _time_of(text: bytes, at: int) -> list[float]:
    """When its line, or the last one before it that says, was written."""
    line_start = text.rfind(b"\n", 0, at) + 1
    before = text[max(line_start - BACK_BYTES, 0) : at]
    found = [(last[0], form) for stamp, form in STAMPS if (last := deque(stamp.finditer(before), maxlen=1))]
    if not found:
        return []
    said, form = max(found, key=lambda pair: pair[0].start())
    try:
        return [time.mktime(time.strptime(said[1].decode().replace("T", " "), form))]
    except (ValueError, OverflowError):
        return []
