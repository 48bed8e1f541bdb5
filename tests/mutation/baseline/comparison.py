"""Whether everything that a test noticed at the base line is still noticed: what is lost, and what can't be said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.baseline.outcomes import Outcomes, names_a_test
from tests.mutation.mutations import names_of

FALLS_BY = 1.0
"""Percentage points of a room's lines: less is noise, since a few lines are passed only when a test is late."""
Rooms = Mapping[str, tuple[int, int]]
"""Of each folder: how many lines can be executed, and how many of them a test has passed."""


@dataclass(kw_only=True)
class Comparison:
    """`lost`: what makes it fail. `moved`: mutants whose module, scope or code is no longer there."""

    lost: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """What was not measured shows nothing, so it does not pass."""
        return 1 if self.lost or self.unmeasured else 0

    def lines(self) -> Iterator[str]:
        yield from self.shown
        yield from (f"gone/moved: {line}" for line in self.moved)
        yield from (f"not measured: {line}" for line in self.unmeasured)
        yield from (f"LOST: {line}" for line in self.lost)
        yield f"{len(self.lost)} lost, {len(self.unmeasured)} not measured, {len(self.moved)} gone or moved"


def compare_mutants(before: Mapping[str, Outcomes], after: Mapping[str, Outcomes], root: Path = Path()) -> Comparison:
    """By module: every mutant that was killed is killed. `root`: of the source as it is now."""
    said = Comparison()
    for path, outcomes in before.items():
        killed = [name for name, was in outcomes.items() if names_a_test(was)]
        file = root / path
        if not file.is_file():
            said.moved.append(f"{path}: the module, with {len(killed)} mutants that were killed")
            continue
        names = names_of(file.read_text())
        scopes = {name.partition(": ")[0] for name in names}
        found = after.get(path, {})
        for name in killed:
            scope = name.partition(": ")[0]
            if name not in names:
                what = "the code" if scope in scopes else "the scope"
                said.moved.append(f"{path}: {what} of {name}")
            elif name not in found:
                said.unmeasured.append(f"{path}: {name}")
            elif not names_a_test(found[name]):
                said.lost.append(f"{path}: {name}: {found[name]}; it was killed by {outcomes[name]}")
    return said


def compare_coverage(before: Rooms, after: Rooms) -> Comparison:
    """By room, with the figures of both; rooms that are new are shown only."""
    said = Comparison()
    for room in sorted({*before, *after}):
        shown = f"{room}: {_share(before.get(room))} → {_share(after.get(room))}"
        said.shown.append(shown)
        if room in before and room not in after:
            said.moved.append(f"{room}: the room")
        elif room in before and _percent(after[room]) < _percent(before[room]) - FALLS_BY:
            said.lost.append(f"coverage of {shown}")
    return said


def all_of(parts: Sequence[Comparison]) -> Comparison:
    return Comparison(
        lost=[line for part in parts for line in part.lost],
        moved=[line for part in parts for line in part.moved],
        unmeasured=[line for part in parts for line in part.unmeasured],
        shown=[line for part in parts for line in part.shown],
    )


def _percent(lines: tuple[int, int]) -> float:
    return 100 * lines[1] / lines[0] if lines[0] else 100.0


def _share(lines: tuple[int, int] | None) -> str:
    return "–" if lines is None else f"{lines[1]} of {lines[0]} lines ({_percent(lines):.1f} %)"
