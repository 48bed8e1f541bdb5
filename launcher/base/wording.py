"""Words of messages: a number of things, the first few of many names, runs of numbers, a long text in one line."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path


def some_of(names: Sequence[str], *, most: int = 12, none: str = "nothing") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else none


def counted(count: int, what: str, *, more: str = "") -> str:
    """`1 request`, `2 requests`; `more` follows."""
    return f"{count:,} {what}{'s' * (count != 1)}{more}"


def signal_name(number: int) -> str:
    """Most real-time signals have a number alone, for which `signal.Signals` raises ValueError."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def in_one_line(text: object, *, longest: int) -> str:
    """As much of it as fits into a line."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6; two neighbours stay two numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(words)


def lines_not_read(count: int, path: Path, first: str = "") -> str:
    """That so many lines of a file were passed over, and why the first was; "" of none."""
    if not count:
        return ""
    are = f"1 line of {path.name} is" if count == 1 else f"{count:,} lines of {path.name} are"
    return f"{are} no record of a run{f' ({first})' if first else ''}"
