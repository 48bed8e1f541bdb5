"""What each server has to do, as the trainer and the Coordinator know it: its clients' requests, and a load of weights.

A server that starts has its own deadline; one that is sent weights owes nobody a token until it has them, for `limit_s`
at most: one that was given up after all that time is stuck. One that merely waits for weights (its trainer starts, a
disk is full) answers as any other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from actors.serving.server_report import ServerWork
from actors.supervision.server_handle import ServerHandle
from launcher.base.messages import ServerInfo, ServerState, TrainerView

LATE_S = 2.0
"""So much later than a load begins may it be seen."""


class ServerLoads:
    def __init__(self, slots: Mapping[str, ServerHandle], *, limit_s: float) -> None:
        self._slots = slots
        self._limit_s = limit_s
        self._ordered: set[str] = set()
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def loads(self, name: str) -> Iterator[None]:
        """Inside the block it is sent weights by order of the Coordinator: the deadline begins anew."""
        self._since[name] = time.monotonic()
        self._ordered.add(name)
        try:
            yield
        finally:
            self._ordered.discard(name)

    def work(self, view: TrainerView) -> dict[str, ServerWork]:
        """Of each server whose start has ended."""
        in_pool = {(info.name, info.generation): info for info in view.servers}
        found = {}
        for name, slot in self._slots.items():
            known = in_pool.get((name, slot.generation))
            is_loading = name in self._ordered or _is_sent(known, view) or self._is_stuck(known)
            if not (slot.serves and is_loading):
                self._since.pop(name, None)
            if slot.is_running:
                found[name] = ServerWork(
                    generation=slot.generation,
                    waiting=view.in_flight.get(name, 0) if slot.serves else 0,
                    loading_s=self._loading_s(name) if slot.serves and is_loading else None,
                    loading_limit_s=self._limit_s,
                )
        return found

    def _loading_s(self, name: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault(name, now)

    def _is_stuck(self, known: ServerInfo | None) -> bool:
        """Its load took all its time, and it has nothing newer."""
        if known is None or known.state is not ServerState.STALE or known.name not in self._since:
            return False
        return self._loading_s(known.name) >= self._limit_s - LATE_S


def _is_sent(known: ServerInfo | None, view: TrainerView) -> bool:
    """The trainer sends it weights by itself."""
    if known is None:
        return False
    return known.name in view.loading or (view.phase == "publish" and known.weight_version != view.policy_version)
