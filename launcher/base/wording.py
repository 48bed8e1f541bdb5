"""Shortens what a message names: the first few of many names, a long text in one line."""

from __future__ import annotations

from collections.abc import Sequence


def some_of(names: Sequence[str], *, most: int = 12, none: str = "nothing") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else none


def in_one_line(text: object, *, longest: int) -> str:
    """As much of it as fits into a line."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
