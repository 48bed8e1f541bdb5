"""The servers that the HealthMonitor is to watch now, each with what it is at.

One that starts is watched by its own deadline; one that loads weights owes nobody a token until it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from actors.monitor_view import Watched
from actors.server_slot import ServerSlot
from launcher.messages import ServerInfo, ServerState, TrainerView
from launcher.policy.watching import Task


class WatchedServers:
    """`load_s`: within which a server must have loaded weights."""

    def __init__(self, slots: Mapping[str, ServerSlot], *, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._publishing_since: float | None = None

    def targets(self, view: TrainerView) -> list[Watched]:
        now = time.monotonic()
        is_publishing = view.phase == "publish"
        self._publishing_since = (self._publishing_since or now) if is_publishing else None
        in_pool = {(info.name, info.generation): info for info in view.servers}
        targets = []
        for name, slot in self._slots.items():
            info = slot.info
            if info is None or info.state is not ServerState.READY or slot.is_over:
                continue
            known = in_pool.get((name, slot.generation))
            task = self._task(slot, known, now) if is_publishing or _is_stale(known) else None
            targets.append(Watched(server=info, waiting=view.in_flight.get(name, 0), task=task))
        return targets

    def _task(self, slot: ServerSlot, known: ServerInfo | None, now: float) -> Task:
        since = self._publishing_since or slot.loading_since or now
        return Task(name="loading weights", since=since, deadline_s=self._load_s)


def _is_stale(known: ServerInfo | None) -> bool:
    return known is not None and known.state is ServerState.STALE
