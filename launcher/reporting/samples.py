"""The completions of steps that samples.jsonl and the file before it have, as they are shown to a person."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from launcher.reporting.terminal_text import visible
from launcher.run_files.journal import TAIL_WINDOW, LineTail, Record
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_integer

MOST = 16
"""Of a step."""
TEXTS = ("prompt", "completion", "prompt_id", "server", "finish_reason")
KEYS = (*TEXTS, "global_step", "attempt", "time", "tokens", "reward", "parts", "weight_version")


def samples_of(paths: RunPaths, step: int | None) -> list[dict[str, object]]:
    """Of the newest step, or of `step`, or where that has none of the nearest one before it; [] where nothing is kept.

    A step that was done again is shown as it was done last. Read from the end of the files, however long they are.
    """
    for file in _files(paths):
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


def samples_around(paths: RunPaths, step: int | None) -> list[dict[str, object]]:
    """As `samples_of`, and behind them those of the step before."""
    found = samples_of(paths, step)
    shown_step = as_integer(found[0].get("global_step")) if found else None
    return found if shown_step is None else found + samples_of(paths, shown_step - 1)


def samples_of_steps(paths: RunPaths, steps: Collection[int]) -> dict[int, list[dict[str, object]]]:
    """Of those of `steps` that have some, as each was done last. All of the files is read."""
    found: dict[int, list[Record]] = {}
    for file in reversed(_files(paths)):
        for line in LineTail(file).read(has_ended=True):
            step = as_integer(line.get("global_step"))
            if step is None or step not in steps:
                continue
            group = found.setdefault(step, [])
            if group and group[0].get("attempt") != line.get("attempt"):
                group.clear()
            group.append(line)
    return {step: [_shown(line) for line in group[-MOST:]] for step, group in found.items()}


def _files(paths: RunPaths) -> tuple[Path, ...]:
    """The newest first."""
    return paths.samples, paths.samples.with_name("samples.1.jsonl")


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
