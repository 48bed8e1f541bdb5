"""What a process prints as it aborts: native code (Rust, C++, CUDA's libraries) writes its reason to standard error and
ends at once, so that it is in no log of Python's. Ray keeps that of a worker in a file of its own."""

from __future__ import annotations

import contextlib
import re
import stat
from pathlib import Path

MOST_BYTES = 2**20
LAST_WORDS = re.compile(
    rb"^(?:memory allocation of \d+ bytes failed|terminate called |Fatal Python error: |.*\bRAW: mmap error: )",
    re.MULTILINE,
)
"""Whoever prints one of these lives on no more: Rust's allocator, C++'s std::terminate, CPython, abseil."""


def errors_file(pid: int) -> Path | None:
    """The file that a live process of this machine prints its errors to; None where that is no file."""
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{pid}/fd/2").readlink()
        return path if stat.S_ISREG(path.stat().st_mode) else None
    return None


def words_of_abort(errors: Path | None) -> str:
    """From the first of its last words on, "" where there are none, or they can't be read."""
    if errors is None:
        return ""
    try:
        with errors.open("rb") as file:
            printed = file.read(MOST_BYTES)
    except OSError:
        return ""
    found = LAST_WORDS.search(printed)
    return printed[found.start() :].decode(errors="replace") if found else ""
