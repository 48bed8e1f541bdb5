"""Reads the text that a process appends to a file, from where the last read ended."""

from __future__ import annotations

import codecs
from pathlib import Path

MOST_BYTES = 4 * 2**20


class TextTail:
    """`offset`: the byte after the last that was read. A file that is shorter than that was begun again, `restarts`
    times."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.restarts = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """What is new, at most MOST_BYTES of it; "" where the file is not there or can't be read now."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                    self.restarts += 1
                    self._decoder.reset()
                file.seek(self.offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return ""
        self.offset += len(data)
        return self._decoder.decode(data)
