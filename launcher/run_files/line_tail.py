"""Reads the lines that others append to a file, from where the last read ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.run_files.journal import LONGEST_LINE, parse_line

WINDOW = 256 * 1024
"""Bytes at the end of a file that are looked through first."""


class LineTail:
    """The complete lines appended to a file since the last `read`; torn ones and what is no object are skipped."""

    def __init__(self, path: Path, *, since: int = 0) -> None:
        """`since`: the byte to begin at; a line that it falls into is torn, and so passed over."""
        self.path = path
        self._offset = since
        self._is_torn = since > 0
        self._is_rest = False  # what is read next belongs to a line that is too long to be one
        self._number = 0 if since == 0 else None
        self.skipped = 0
        """Lines that are no object, but for one that `since` falls into."""
        self.first_skipped = ""
        """Which line that was, and why; "" where `since` leaves it unknown."""

    def read(self, *, has_ended: bool = False) -> Iterator[Mapping[str, object]]:
        """`has_ended`: nobody writes any more, so that a last line without its end is all that will ever be there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                    if not line.endswith(b"\n") and len(line) < LONGEST_LINE and not has_ended:
                        return  # still being written: from here again next time
                    self._offset = file.tell()
                    was_rest = self._is_rest
                    self._is_rest = len(line) == LONGEST_LINE and not line.endswith(b"\n")
                    if not was_rest:
                        yield from self._records_in(line)
                        self._is_torn = False
        except OSError:
            return  # not there yet, or not readable now: it is tried again

    def _records_in(self, line: bytes) -> Iterator[Mapping[str, object]]:
        if self._number is not None:
            self._number += 1
        record, why_none = parse_line(line)
        if record is not None:
            yield record
        elif why_none and not self._is_torn:
            self.skipped += 1
            if not self.first_skipped and self._number is not None:
                self.first_skipped = f"line {self._number}: {why_none}"


def newest_line(path: Path) -> Mapping[str, object]:
    """The last line of a file; empty where there is none."""
    size = path.stat().st_size if path.exists() else 0
    lines = LineTail(path, since=max(0, size - WINDOW)).read(has_ended=True)
    return next(iter(deque(lines, maxlen=1)), {})


def current_line(path: Path, step: int) -> Mapping[str, object] | None:
    """The line that is current for a step (`journal.current_lines`), searched from the end of the file: a restored
    trainer asks for one of the last, and a run of 100,000 steps would take 0.3 GB of its memory."""
    size, window = path.stat().st_size if path.exists() else 0, WINDOW
    while True:
        for line in reversed(list(LineTail(path, since=max(0, size - window)).read(has_ended=True))):
            known = line.get("global_step")
            if isinstance(known, int) and known <= step:
                return line if known == step else None
        if window >= size:
            return None
        window *= 8
