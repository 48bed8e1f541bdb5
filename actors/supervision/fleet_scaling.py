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
from actors.supervision.interfaces import Facts
from actors.supervision.run_history import RunHistory
from actors.supervision.server_handle import STOP_S, ServerHandle
from actors.weights.start_weights import forget
from launcher.base.errors import LauncherError, ServerError

ACTOR_S = 60.0
"""For Ray to make an actor, or to end one."""
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
        self.leave_deadline_s = drain_s + STOP_S + ACTOR_S + 2 * MARGIN_S

    async def slot_of(self, name: str) -> ServerHandle:
        """From now on it is watched and repaired as the others. Raises ServerError where nobody made its actor."""
        if name not in self._observer.slots:
            slot = self._observer.add_slot(name, await self._until(name, is_there=True))
            slot.begin_looking()
        return self._observer.slots[name]

    async def leave(self, name: str) -> Facts:
        slot, moved = self._observer.slots[name], 0
        with contextlib.suppress(LauncherError):  # a trainer that is away has no requests here
            moved = await self._observer.trainer.call(
                "drain_server", name, self._drain_s, within_s=self._drain_s + MARGIN_S
            )
        try:
            await slot.stop()
        except LauncherError as error:  # its actor is ended next, and its tree with it
            self._history.event("actor.stop_failed", subject=name, reason=error.message)
        await asyncio.to_thread(forget, name, self._observer.trainer.view.weights)
        with contextlib.suppress(ValueError):  # it has none any more
            await asyncio.to_thread(lambda: self._end(self._find(name)))
        await self._until(name, is_there=False)
        self._observer.drop_slot(name)
        await slot.close()
        return {"moved": moved, "servers": len(self._observer.slots)}

    async def _until(self, name: str, *, is_there: bool) -> Any:
        """Its actor, once it has one; None once it has none."""
        try:
            async with asyncio.timeout(ACTOR_S):
                while True:
                    actor = None
                    with contextlib.suppress(ValueError):
                        actor = await asyncio.to_thread(self._find, name)
                    if (actor is not None) is is_there:
                        return actor
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            told = "no actor was made for" if is_there else "the actor did not end of"
            raise ServerError(f"{told} {name} within {ACTOR_S:g} s") from error
