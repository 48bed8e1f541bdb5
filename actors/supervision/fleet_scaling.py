"""Brings servers to a run that trains, and takes them away.

The driver makes an actor for each server that there is to be (actors/supervision/run_actors.py); it is ended here, so
that its name is free again when the journal has `server.left`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray

from actors.supervision.cluster_observer import MARGIN_S, ClusterObserver
from actors.supervision.coordinator import Facts
from actors.supervision.run_history import RunHistory
from actors.supervision.server_handle import STOP_S, ServerHandle
from actors.weights.start_weights import forget
from launcher.base.errors import LauncherError

LOOK_S = 0.25


class FleetScaling:
    """`find` gives the actor of a name, ValueError where there is none; `end` ends one for good."""

    def __init__(
        self,
        history: RunHistory,
        observer: ClusterObserver,
        *,
        drain_s: float,
        find: Callable[[str], Any] = ray.get_actor,
        end: Callable[[Any], None] = ray.kill,
    ) -> None:
        self._history = history
        self._observer = observer
        self._drain_s = drain_s
        self._find = find
        self._end = end
        self.leave_deadline_s = drain_s + STOP_S + 2 * MARGIN_S

    async def slot_of(self, name: str) -> ServerHandle:
        """From now on it is watched and repaired as the others."""
        if name not in self._observer.slots:
            while (actor := await self._actor_of(name)) is None:  # the driver makes it; the action has a deadline
                await asyncio.sleep(LOOK_S)
            self._observer.add_slot(name, actor)
        return self._observer.slots[name]

    async def leave(self, name: str) -> Facts:
        slot, moved = self._observer.slots[name], 0
        with contextlib.suppress(LauncherError):  # a trainer that is away has no requests here
            within_s = self._drain_s + MARGIN_S
            moved = await self._observer.trainer.call("drain_server", name, self._drain_s, within_s=within_s)
        try:
            await slot.stop()
        except LauncherError as error:  # its actor is ended next, and its tree with it
            self._history.event("actor.stop_failed", subject=name, reason=error.message)
        await asyncio.to_thread(forget, name, self._observer.trainer.view.weights)
        while (actor := await self._actor_of(name)) is not None:
            await asyncio.to_thread(self._end, actor)
            await asyncio.sleep(LOOK_S)
        self._observer.drop_slot(name)
        return {"moved": moved, "servers": len(self._observer.slots)}

    async def _actor_of(self, name: str) -> Any:
        with contextlib.suppress(ValueError):
            return await asyncio.to_thread(self._find, name)
        return None
