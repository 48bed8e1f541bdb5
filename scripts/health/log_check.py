"""Connection errors in the logs of a run whose servers nobody watches, AReaL's: by kind and time, in the last LOG_BYTES
of each, however large they are."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.findings import Finding
from launcher.reporting.formats import age
from scripts.health.findings import ABSENT, BAD, NOTE, OK
from scripts.health.log_times import LogTimes
from scripts.health.run_check import Subject

LOG_BYTES = 32 * 2**20
BACK_BYTES = 16 * 1024
"""How far before a line without a time one is looked for: tracebacks have one at their head."""
KINDS = {
    "connection refused": rb"Connection ?[Rr]efused|Connect call failed",
    "connection reset": rb"Connection ?[Rr]eset|reset by peer|connection broke off|Server disconnected|Broken ?pipe",
    "timed out": rb"TimeoutError|ReadTimeout|ConnectTimeout|[Tt]imed out|no answer within",
    "answer broke off": rb"answer broke off|IncompleteRead|ClientPayloadError",
    "server error (5xx)": rb'HTTP/1\.[01]" 5\d\d|\b50[0-4] (?:Internal Server Error|Bad Gateway|Service Unavailable)',
    "request given up": rb"Failed after \d+ retries each|Workflow execution failed",
}
ANY = re.compile(b"|".join(b"(%b)" % pattern for pattern in KINDS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsSeen:
    """Lines of one kind in one log. Times are unix seconds, None where no line had one whose zone is known."""

    kind: str
    log: str
    count: int
    first: float | None = None
    last: float | None = None


def check_logs(subject: Subject) -> list[Finding]:
    if subject.areal is None and not subject.has_own_servers:
        text = "a run of this launcher watches its servers itself: its logs are not searched"
        return [Finding("connections", text, ABSENT)]
    logs = sorted(subject.paths.logs.glob("*.log"))
    if not logs:
        return [Finding("connections", "there is no log", ABSENT)]
    longest = max((log.stat().st_size for log in logs if log.exists()), default=0)
    seen = [errors for log in logs for errors in errors_in(log)]
    return judge_errors(
        seen, now=time.time(), recent_s=subject.recent_s, is_live=subject.may_be_live, is_all=longest <= LOG_BYTES
    )


def judge_errors(
    seen: Sequence[ErrorsSeen], *, now: float, recent_s: float, is_live: bool, is_all: bool = True
) -> list[Finding]:
    """Recent errors of a live run are bad. Older ones are a note: the run has repaired their cause. `is_all`: the logs
    were read from their beginning."""
    if not seen:
        where = "the logs" if is_all else f"the last {LOG_BYTES // 2**20} MiB of each log"
        return [Finding("connections", f"no connection error in {where}", OK)]
    findings = []
    for one in seen:
        when = ", at times that the log does not say, or whose zone is not known"
        if one.first is not None and one.last is not None:
            since = f"from {age(now - one.first)} ago to " if one.count > 1 else ""
            when = f", {since}{age(now - one.last)} ago"
        is_recent = is_live and one.last is not None and now - one.last <= recent_s
        text = f"{one.count:,} × {one.kind}{when}"
        findings.append(Finding(one.log, text, BAD if is_recent else NOTE, facts=dataclasses.asdict(one)))
    return findings


def errors_in(log: Path) -> Iterator[ErrorsSeen]:
    """One for each kind that occurs; a log that can't be read is reported as a kind of its own."""
    try:
        text, changed_at = _end_of(log)
    except OSError as error:
        yield ErrorsSeen(kind=f"can't be read ({error.strerror})", log=log.name, count=1)
        return
    dates = LogTimes(text, changed_at=changed_at)
    counts: Counter[str] = Counter()
    times: defaultdict[str, list[float]] = defaultdict(list)
    line_end = -1
    for match in ANY.finditer(text):
        if match.start() < line_end:  # one line is one error, of the first kind that it names
            continue
        line_end = text.find(b"\n", match.end())
        line_end = len(text) if line_end < 0 else line_end
        assert match.lastindex is not None
        kind = list(KINDS)[match.lastindex - 1]
        counts[kind] += 1
        if (seconds := dates.before(match.start(), BACK_BYTES)) is not None:
            times[kind].append(math.floor(seconds))
    for kind, count in sorted(counts.items()):
        first, last = min(times[kind], default=None), max(times[kind], default=None)
        yield ErrorsSeen(kind=kind, log=log.name, count=count, first=first, last=last)


def _end_of(log: Path) -> tuple[bytes, float]:
    """And when it was written last."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, 2) - LOG_BYTES, 0))
        text = file.read(LOG_BYTES)
        return text, os.fstat(file.fileno()).st_mtime
