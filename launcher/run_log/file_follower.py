"""Hands the lines of a run's files, as they grow, to whoever takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.base.errors import JournalError
from launcher.base.wording import lines_not_read
from launcher.run_files.journal import LineTail, Record

TakeLine = Callable[[Record], bool]
"""Whether the line is what its file holds."""


class FileFollower:
    """`refresh` hands on what is new in the files, file by file in the order given."""

    def __init__(self, files: Sequence[tuple[Path, TakeLine]]) -> None:
        self._files = [(LineTail(path), take) for path, take in files]
        self._foreign: Counter[Path] = Counter()

    def refresh(self, *, has_ended: bool = False) -> int:
        """How many lines were new. `has_ended`: nobody writes any more."""
        count = 0
        for tail, take in self._files:
            for line in tail.read(has_ended=has_ended):
                self._foreign[tail.path] += not take(line)
                count += 1
        return count

    def not_read(self, *, with_why: bool = False) -> tuple[str, ...]:
        """The files that can't be read, and of the others how many lines say nothing: torn ones, and objects of
        something else. `with_why`: also which is the first torn one, and why."""
        tails = sorted((tail for tail, _ in self._files), key=lambda tail: tail.path)
        counts = ((one, one.skipped + self._foreign[one.path]) for one in tails)
        refused = [f"{one.path.name} {why}" for one in tails if (why := unreadable(one.path))]
        lines = [lines_not_read(n, one.path, one.first_skipped if with_why else "") for one, n in counts if n]
        return (*refused, *lines)


def check_readable(*files: Path) -> None:
    """Raises JournalError naming a file that is there and can't be read."""
    for path in files:
        if why := unreadable(path):
            raise JournalError(f"{path} {why}", "check its permissions")


def unreadable(path: Path) -> str:
    """Why a file that is there can't be read; "" where it can, and where there is none: its first writer may come."""
    try:
        with path.open("rb"):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
