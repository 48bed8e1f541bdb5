"""Follows a run through its files alone, as its driver and `attach` do.

events.jsonl ─► what happens      metrics.jsonl ─► the committed steps      now.json ─► phase, servers
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.reporting.current_status import CurrentStatus, read_now
from launcher.reporting.event_lines import EventTail
from launcher.run_files.journal import Record
from launcher.run_files.run_paths import RunPaths


class FollowedRun:
    """What its files say from now on, each once."""

    def __init__(self, paths: RunPaths, attempt: int | None = None) -> None:
        """`attempt`: whose events and status; None: of every attempt. Steps are those that anybody writes: a trainer
        that begins may complete the last one of the attempt before."""
        self._paths = paths
        self._attempt = attempt
        self._events = EventTail(paths.events, attempt)
        self._steps = EventTail(paths.metrics)
        self._beat = (-1, -1)

    def new_events(self, unwritten: Sequence[Record] = ()) -> list[Record]:
        """`unwritten`: as of EventTail."""
        return self._events.new_events(unwritten)

    def new_steps(self) -> list[Record]:
        return self._steps.new_events()

    def new_status(self) -> CurrentStatus | None:
        """None where nobody has written since the last time."""
        now = read_now(self._paths)
        if now is None or self._attempt not in (None, now.attempt) or (now.attempt, now.beat) == self._beat:
            return None
        self._beat = (now.attempt, now.beat)
        return now
