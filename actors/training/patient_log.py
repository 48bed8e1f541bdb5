"""A log file for a process that must continue when the disk refuses its lines: it counts them, and says how many."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


class PatientFileHandler(logging.FileHandler):
    """`lost`: lines that the disk refused since the last one that it took."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)  # else a disk that is full now would refuse the file, and so the process
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self.lost
        try:
            super().emit(record)
        except OSError:  # the file can't be opened
            self.handleError(record)
        if before and self.lost == before:
            self.lost = 0
            said = f"{before} lines of this log were lost: the disk refused them"
            super().emit(logging.LogRecord("log", logging.WARNING, __file__, 0, said, (), None))

    def handleError(self, record: logging.LogRecord) -> None:
        """Of logging: called where a line could not be written, or not even be made of its arguments."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        self.lost += 1
        try:
            self.close()  # opened again by the next line
        except OSError:  # what it held back is lost with the line
            return
