"""Follows a run for its screen: new events as lines, and the trainer's newest snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.foreign.foreign_actors import ForeignActors
from actors.supervision.run_actors import RunActors
from launcher.base.errors import LauncherError
from launcher.base.messages import Snapshot
from launcher.cli.deadlines import Deadlines
from launcher.cli.run_screen import Screen
from launcher.reporting.current_status import CurrentStatusFile
from launcher.reporting.event_lines import EventTail, alert_of, tell
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files.journal import Journal, Record
from launcher.run_files.run_paths import RunPaths

STOP_TIMEOUT_S = 5.0
"""For the last answers when the run has ended."""


class RunFollower:
    """`actors`: None until they are created."""

    def __init__(
        self,
        paths: RunPaths,
        journal: Journal,
        screen: Screen,
        now: CurrentStatusFile,
        memory: SeenMemory,
        deadlines: Deadlines,
    ) -> None:
        self._journal = journal
        self._screen = screen
        self._now = now
        self._memory = memory
        self._deadlines = deadlines
        self._events = EventTail(paths.events, journal.attempt)
        self.actors: RunActors | ForeignActors | None = None
        self._nodes_told: set[str] = set()
        self._look: ray.ObjectRef[Snapshot] | None = None
        self._steps_seen, self._trainer_pid = 0, 0
        self._snapshot_error = ""

    def say_lost(self, nodes: Mapping[str, str]) -> None:
        """Where nobody else has: the Coordinator was lost with its node, perhaps, and its next incarnation waits."""
        for node in nodes.keys() - self._nodes_told:
            self._nodes_told.add(node)
            facts: dict[str, Any] = {"node": node, "held": ["the Coordinator"], "cause": "node_lost"}
            self._journal.record("node.lost", subject=nodes[node], reason=f"node {node[:8]} was lost", **facts)

    def show(self, *, wait: bool = False, unwritten: Sequence[Mapping[str, object]] = ()) -> None:
        """New events as lines, and the trainer's newest snapshot; one that doesn't answer costs a stale view.

        `unwritten`: events that the disk has not taken, as the Coordinator last had them.
        """
        assert self.actors is not None
        for event in self._events.new_events(unwritten):
            if event.get("event") == "node.lost":
                self._nodes_told.add(str(event.get("node")))
            self.actors.follow(event)
            self._deadlines.follow(event)
            self.tell(event)
        self._now.write_if_due()
        if self._look is None:
            self._look = self.actors.trainer.snapshot.remote(self._steps_seen)
        done, _ = ray.wait([self._look], timeout=STOP_TIMEOUT_S if wait else 0)
        if not done:
            return
        look, self._look = self._look, None
        try:
            seen = ray.get(look)
        except RayTaskError as error:
            if not isinstance(error.cause, LauncherError):  # else: not started yet
                self._report_snapshot_error(repr(error.cause))
        except RayError:  # the actor is being restarted
            return
        else:
            self._snapshot_error = ""
            self._now.heard(seen)
            self._take(seen)

    def tell(self, event: Record) -> None:
        if line := tell(event):
            self._screen.milestone(line)
        if alert := alert_of(event):
            self._screen.alert(*alert)

    def _report_snapshot_error(self, error: str) -> None:
        """A defect, which would stop the display silently. Once, until a snapshot succeeds or fails otherwise."""
        if error != self._snapshot_error:
            self._snapshot_error = error
            self._journal.record("trainer.snapshot_failed", subject="trainer", reason=error)
            self._screen.line(f"the display is out of date: the trainer's snapshot failed: {error} (this is a defect)")

    def _take(self, snapshot: Snapshot) -> None:
        self._deadlines.take(snapshot.reports)
        if snapshot.status.pid != self._trainer_pid:  # another incarnation counts its steps from 0
            self._trainer_pid, was_new = snapshot.status.pid, self._steps_seen == 0
            self._steps_seen = 0
            if not was_new:
                return
        self._steps_seen = snapshot.committed
        self._memory.look_if_due(snapshot.committed)
        self._screen.show(snapshot.status, servers=snapshot.servers, reports=snapshot.reports, evals=snapshot.evals)
