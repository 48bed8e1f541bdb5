"""The order of a run's events and steps, whatever its clock was set to meanwhile.

Each file is in order by itself. Between the two, an event that says of which restore it is comes before the steps from
there, and after those from the restore before it; for lines that don't say, the attempt decides, and within an attempt
the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from launcher.run_files.journal import Record, number_of

Place = tuple[int, int] | None
"""The attempt, and how many restores lay behind the trainer's weights; None: it doesn't say."""

Step = TypeVar("Step")
RESTORED = "trainer.restored"
OUTSIDE_WEIGHTS = "health.outside_weights"
"""The last restore was not borne out: what it set aside is put back."""
TAKEN = "recovery.taken"
"""A person's restore, by the attempt that begins with it."""
OF_A_RESTORE = frozenset({RESTORED, "trainer.loaded"})
"""The trainer's own event, and the Coordinator's once it has heard of it."""
UNDOING = OF_A_RESTORE | {TAKEN}
"""Events after which the weights are those of the step that they name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEvent:
    """`after`: so many lines of steps were written before it."""

    after: int
    event: Record


def place_events(
    events: Iterable[Record], steps: Sequence[Step], record_of: Callable[[Step], Record]
) -> list[PlacedEvent]:
    """Each event with its place among the steps; `record_of` gives the head fields of one, which are no event's."""
    found: list[PlacedEvent] = []
    after = 0
    for line in in_order(events, map(record_of, steps)):
        if "event" in line:
            found.append(PlacedEvent(after=after, event=line))
        else:
            after += 1
    return found


def in_order(events: Iterable[Record], steps: Iterable[Record]) -> Iterator[Record]:
    """Both as one. `events`: those that matter, each `trainer.restored` among them."""
    waiting = deque(with_places(events))
    for line in steps:
        while waiting and _came_before(*waiting[0], line):
            yield waiting.popleft()[0]
        yield line
    for event, _ in waiting:
        yield event


def with_places(events: Iterable[Record]) -> Iterator[tuple[Record, Place]]:
    """Each event with the restore that its trainer's weights come from."""
    places = Places()
    for event in events:
        yield event, places.place_of(event)


class Places:
    """Of which restore an event is, from the events before it."""

    def __init__(self) -> None:
        self._lineages: dict[int, object] = {}  # by attempt: one that ended may still write a line

    def place_of(self, event: Record) -> Place:
        """To be asked of each event in turn."""
        attempt = event.get("attempt")
        if not isinstance(attempt, int):
            return None
        if event.get("event") == RESTORED:
            self._lineages[attempt] = event.get("lineage")
        return _place(attempt, self._lineages.get(attempt, 0))


def _place(attempt: object, lineage: object) -> Place:
    return (attempt, lineage) if isinstance(attempt, int) and isinstance(lineage, int) else None


def _came_before(event: Record, place: Place, line: Record) -> bool:
    here, name = _place(line.get("attempt"), line.get("lineage")), event.get("event")
    if place is None or here is None:
        written, seen = event.get("attempt"), line.get("attempt")
        if isinstance(written, int) and isinstance(seen, int) and written != seen:
            return written < seen
        return _time(event) <= _time(line)
    if place != here or name not in ("reward.rebased", OUTSIDE_WEIGHTS):
        return place <= here
    if name == OUTSIDE_WEIGHTS:
        return False  # of weights that were cleared no further step was taken
    step, before_step = line.get("global_step"), event.get("before_step")
    if isinstance(step, int) and isinstance(before_step, int):
        return before_step <= step
    return _time(event) <= _time(line)  # it was written before it said so


def _time(line: Record) -> float:
    return number_of(line.get("time"), 0.0)
