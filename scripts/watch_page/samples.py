"""The completions of a step, read from the end of samples.jsonl, however long it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.reporting.terminal_text import visible
from launcher.run_files.journal import TAIL_WINDOW, LineTail, Record
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_integer

MOST = 16
TEXTS = ("prompt", "completion", "prompt_id", "server", "finish_reason")
KEYS = (*TEXTS, "global_step", "attempt", "time", "tokens", "reward", "parts", "weight_version")


def samples_of(paths: RunPaths, step: int | None) -> list[dict[str, object]]:
    """Of the newest step, or of `step`, or where that has none of the nearest one before it; [] where nothing is kept.

    A step that was done again is shown as it was done last.
    """
    for file in (paths.samples, paths.samples.with_name("samples.1.jsonl")):
        size, window = file.stat().st_size if file.exists() else 0, TAIL_WINDOW
        while size:
            lines = list(LineTail(file, since=max(0, size - window)).read())
            found = _last_of(lines, step)
            if window >= size or (found and found[0] is not lines[0]):  # else its first lines are before the window
                if found:
                    return [_shown(line) for line in found[:MOST]]
                break
            window *= 8
    return []


def _last_of(lines: Sequence[Record], step: int | None) -> list[Record]:
    found: list[Record] = []
    for line, number in _numbered_backwards(lines):
        if found and (number, line.get("attempt")) != (found[0].get("global_step"), found[0].get("attempt")):
            break
        if found or step is None or number <= step:
            found.insert(0, line)
    return found


def _numbered_backwards(lines: Sequence[Record]) -> Iterator[tuple[Record, int]]:
    for line in reversed(lines):
        number = as_integer(line.get("global_step"))
        if number is not None:
            yield line, number


def _shown(line: Record) -> dict[str, object]:
    """Texts without what would turn the reading direction or show nothing."""
    return {key: visible(str(line[key])) if key in TEXTS else line[key] for key in KEYS if key in line}
