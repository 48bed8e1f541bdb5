"""Adds servers to a run and removes them, while it trains.

joining  the driver creates its actor, as it did for the others ─► it starts, gets weights and the golden probe as any
         server that is restarted ─► traffic
leaving  no traffic any more ─► in-flight requests finish, or are migrated ─► it stops ─► the driver ends its actor
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from actors.processes.background_tasks import BackgroundTasks
from actors.supervision.cluster_observer import MARGIN_S, ClusterObserver
from actors.supervision.interfaces import Facts
from actors.supervision.run_history import RunHistory
from actors.supervision.server_handle import STOP_S, ServerHandle
from actors.weights.start_weights import forget
from launcher.base.errors import LauncherError, ServerError
from launcher.config.schema import RunConfig

ACTOR_S = 60.0
LOOK_S = 0.25


class FleetScaling:
    """`start` is how a slot's server is started; `find` gives the actor of a name, ValueError where there is none."""

    def __init__(
        self,
        config: RunConfig,
        history: RunHistory,
        observer: ClusterObserver,
        *,
        start: Callable[[ServerHandle], Awaitable[object]],
        find: Callable[[str], Any] = ray.get_actor,
    ) -> None:
        self._history = history
        self._observer = observer
        self._start = start
        self._find = find
        self._drain_s = config.sglang.drain_timeout
        self._tasks = BackgroundTasks()
        self.join_deadline_s = ACTOR_S + MARGIN_S
        self.leave_deadline_s = self._drain_s + STOP_S + 2 * MARGIN_S

    async def join(self, name: str) -> Facts:
        """From now on it is watched and repaired as the others. Raises ServerError where nobody created its actor."""
        slot = self._observer.add_slot(name, await self._actor_of(name))
        slot.expect()
        slot.begin_looking()
        self._tasks.start(self._begin(slot))
        return {"servers": len(self._observer.slots)}

    async def _actor_of(self, name: str) -> Any:
        try:
            async with asyncio.timeout(ACTOR_S):
                while True:
                    with contextlib.suppress(ValueError):
                        return await asyncio.to_thread(self._find, name)
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise ServerError(f"no actor was made for {name} within {ACTOR_S:g} s") from error

    async def _begin(self, slot: ServerHandle) -> None:
        try:
            await self._start(slot)
        except Exception as error:  # noqa: BLE001 - the run has other servers: the plan repairs it, whatever it failed for
            reason = error.message if isinstance(error, LauncherError) else f"a defect: {error!r}"
            slot.not_started(reason)
            self._history.event("start.failed", subject=slot.name, reason=reason)
        self._observer.changed.set()

    async def leave(self, name: str) -> Facts:
        slot = self._observer.slots.get(name)
        if slot is None:
            return {"moved": 0, "servers": len(self._observer.slots)}
        moved = 0
        with contextlib.suppress(LauncherError):  # a trainer that is away has no requests here
            moved = await self._observer.trainer.call(
                "drain_server", name, self._drain_s, within_s=self._drain_s + MARGIN_S
            )
        try:
            await slot.stop()
        except LauncherError as error:  # its actor is ended next, and its tree with it
            self._history.event("actor.stop_failed", subject=name, reason=error.message)
        await asyncio.to_thread(forget, name, self._observer.trainer.view.weights)
        self._observer.slots.pop(name, None)
        await slot.close()
        return {"moved": moved, "servers": len(self._observer.slots)}

    async def close(self) -> None:
        await self._tasks.close()
