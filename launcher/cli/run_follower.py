"""Follows a run for the screen of its driver: new events as lines, and the panel, both from the run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.foreign.foreign_actors import ForeignActors
from actors.supervision.run_actors import RunActors
from launcher.cli.deadlines import Deadlines
from launcher.cli.run_screen import Screen
from launcher.reporting.event_lines import alert_of, tell
from launcher.reporting.followed_run import FollowedRun
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files.journal import Journal, Record, number_of
from launcher.run_files.run_paths import RunPaths

NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class RunFollower:
    """`actors`: None until they are created."""

    def __init__(
        self, paths: RunPaths, journal: Journal, screen: Screen, memory: SeenMemory, deadlines: Deadlines
    ) -> None:
        self._journal = journal
        self._screen = screen
        self._memory = memory
        self._deadlines = deadlines
        self._run = FollowedRun(paths, journal.attempt)
        self.actors: RunActors | ForeignActors | None = None
        self._nodes_told: set[str] = set()
        self._steps_seen = 0

    def say_lost(self, nodes: Mapping[str, str]) -> None:
        """Where nobody else has: the Coordinator was lost with its node, perhaps, and its next incarnation waits."""
        for node in nodes.keys() - self._nodes_told:
            self._nodes_told.add(node)
            facts: dict[str, Any] = {"node": node, "held": ["the Coordinator"], "cause": "node_lost"}
            self._journal.record("node.lost", subject=nodes[node], reason=f"node {node[:8]} was lost", **facts)

    def show(self, *, unwritten: Sequence[Mapping[str, object]] = ()) -> None:
        """What is new in the run's files. `unwritten`: events that the disk has not taken, as the Coordinator last had
        them."""
        assert self.actors is not None
        for event in self._run.new_events(unwritten):
            if event.get("event") == "node.lost":
                self._nodes_told.add(str(event.get("node")))
            self.actors.follow(event)
            self._deadlines.follow(event)
            self.tell(event)
        now = self._run.new_status()
        # After the status: it never counts a step whose line is not read yet.
        steps = [_with_numbers(line) for line in self._run.new_steps()]
        self._deadlines.take(steps)
        self._steps_seen += len(steps)
        self._memory.look_if_due(self._steps_seen)
        self._screen.show(now, steps)

    def tell(self, event: Record) -> None:
        self._screen.follow(event)
        if line := tell(event):
            self._screen.milestone(line)
        if alert := alert_of(event):
            self._screen.alert(*alert)


def _with_numbers(line: Record) -> Record:
    """JSON has no NaN and no infinity, and WandB would draw their names as texts."""
    return {key: number_of(value) if value in NOT_FINITE else value for key, value in line.items()}
