"""What others append to a file of lines, read on from where one was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.journal import LONGEST_LINE


class Tail:
    """The whole lines that were appended to a file since the last `read`. What is torn or no object is passed over."""

    def __init__(self, path: Path, *, since: int = 0) -> None:
        """`since`: the byte to begin at; a line that it falls into is torn, and so passed over."""
        self._path = path
        self._offset = since

    def read(self, *, has_ended: bool = False) -> Iterator[Mapping[str, object]]:
        """`has_ended`: nobody writes any more, so that a last line without its end is all that will ever be there."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                    if not line.endswith(b"\n") and len(line) < LONGEST_LINE and not has_ended:
                        return  # still being written: from here again next time
                    self._offset = file.tell()
                    record = _parse(line)
                    if record is not None:
                        yield record
        except OSError:
            return  # not there yet, or not readable now: it is tried again


def _parse(line: bytes) -> Mapping[str, object] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a line of brackets, nested deeper than any parser goes
        return None
    return record if isinstance(record, dict) else None
