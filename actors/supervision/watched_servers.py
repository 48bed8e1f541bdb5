"""The servers that the HealthMonitor is to watch now, each with what it is at.

One that starts is watched by its own deadline; one that loads weights owes nobody a token until it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from actors.monitoring.monitor_view import Watched
from actors.supervision.server_handle import ServerHandle
from launcher.base.messages import ServerInfo, ServerState, TrainerView
from launcher.policy.observation_history import Task


class WatchedServers:
    """`load_s`: within which a server must have loaded weights."""

    def __init__(self, slots: Mapping[str, ServerHandle], *, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._loading_since: dict[str, float] = {}

    def load_begins(self, name: str) -> None:
        """Weights are sent anew: its deadline begins anew."""
        self._loading_since[name] = time.monotonic()

    def targets(self, view: TrainerView) -> list[Watched]:
        in_pool = {(info.name, info.generation): info for info in view.servers}
        targets = []
        for name, slot in self._slots.items():
            info, known = slot.info, in_pool.get((name, slot.generation))
            lives = info is not None and info.state is ServerState.READY and not slot.is_over
            is_loading = lives and _is_loading(known, view)
            if not is_loading:
                self._loading_since.pop(name, None)
            if info is not None and lives:
                task = self._task(name) if is_loading else None
                targets.append(Watched(server=info, waiting=view.in_flight.get(name, 0), task=task))
        return targets

    def _task(self, name: str) -> Task:
        since = self._loading_since.setdefault(name, time.monotonic())
        return Task(name="loading weights", since=since, deadline_s=self._load_s)


def _is_loading(known: ServerInfo | None, view: TrainerView) -> bool:
    """It is not the trainer's version yet, and somebody is sending that."""
    if known is None:
        return False
    is_behind = known.weight_version != view.policy_version
    return known.state is ServerState.STALE or (view.phase == "publish" and is_behind)
