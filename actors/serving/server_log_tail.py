"""Finds in a log why the process that wrote it has ended: the few decisive lines out of thousands. The wording is that
of SGLang 0.5.17 and of Python itself, which the trainer shares."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.policy.exit_cause import OF_A_SERVER

TAIL_BYTES = 256 * 1024
MOST_LINES = 6

DECISIVE = re.compile(
    "|".join(
        [
            *(pattern.pattern for pattern, *_ in OF_A_SERVER),
            r"out of memory",
            r"\w+ hit an exception",
            r"crashed with exit code",
            r"address already in use",
            r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Missing)\b(?::|$)",  # the last line of a traceback
            r"^[\w./-]+: error: ",  # argparse's
            r"actors\.serving\.sglang_cpu serves on the CPU",
        ]
    ),
    re.IGNORECASE | re.MULTILINE,
)
LAST_WORDS = re.compile(
    r"^(?:memory allocation of \d+ bytes failed|terminate called |Fatal Python error: |.*\bRAW: mmap error: )",
    re.MULTILINE,
)
"""Whoever prints one of these lives on no more: Rust's allocator, C++'s std::terminate, CPython, abseil."""
STAMP = re.compile(r"^\[[\d: -]{19}[^\]]*\] ")


def decisive_lines(text: str) -> list[str]:
    """The last different lines of `text` that show a cause, in order, without their time stamps."""
    found = [STAMP.sub("", line).strip() for line in text.splitlines() if DECISIVE.search(STAMP.sub("", line))]
    return list(dict.fromkeys(reversed(found)))[:MOST_LINES][::-1]


def tail(log: Path, since: int) -> str:
    """What was written from byte `since` on, at most the last `TAIL_BYTES`; empty where there is no log, or none that
    can be read now: a missing log must neither keep a death from being reported nor make an observation fail."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(since, end - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def words_of_abort(errors: Path | None) -> str:
    """From the first of a process's last words on, "" where there are none. Native code writes its reason to standard
    error and ends at once, so that it is in no log of Python's; of a worker Ray keeps that in a file of its own."""
    printed = "" if errors is None else tail(errors, 0)
    found = LAST_WORDS.search(printed)
    return printed[found.start() :] if found else ""


def size_of(log: Path) -> int:
    """Bytes; 0 of a log that isn't there, or can't be read now."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_line(text: str) -> str:
    """The last line that is not blank; empty where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
