"""The Coordinator's handle of the trainer's other actor: an empty process, or one that is parked to take over.

Two actors of one class take turns. When the one that is the trainer ends, the parked one takes its place, and the empty
process that Ray starts for the first is parked next. Only what was found empty, or parked, can become the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from actors.cluster.actor_calls import ActorProbe, answer, call_method
from launcher.base.errors import LauncherError, TrainerError
from launcher.base.messages import Overrides, TrainerView
from launcher.policy.observed import StandbyTrainer

ANSWER_S = 3.0
LOOK_S = 4.0
PROMPT_S = 1.0
"""What takes longer to answer when it is needed does not take over; the trainer starts cold."""
PARKING_S = 5.0
"""One that is just being parked is waited for so long: it is ahead of a cold start, but at low priority."""
HURRIED_S = 15.0
"""The same where its priority could be raised: as long as a cold start takes."""
PARK_S = 300.0
NEW_PROCESS_S = 60.0
SOON_S = 0.05
NEW_S = 0.25
"""Between two questions to a process that Ray is still starting."""
PARKING = "parking"
NICENESS = 5
"""Of the imports. At 19 a standby was parked after 8 s at a load of 5, after 36 s at 13."""


class StandbyHandle:
    """`names`: the trainer's actor and this one. `took_over` is called with the name and the actor that are the
    trainer's from then on. `changed` is set when it has answered.
    """

    def __init__(
        self,
        actor: Any,
        names: tuple[str, str],
        *,
        took_over: Callable[[str, Any], Awaitable[None]],
        changed: asyncio.Event,
        hung_after_s: float,
    ) -> None:
        self.actor = actor
        self._names = names
        self._took_over = took_over
        self._view = TrainerView(pid=0)
        self._viewed_at = time.monotonic()
        self._changed = changed
        self._hung_after_s = hung_after_s
        self.probe = ActorProbe(self._ask, heard=self._take_view)

    def begin_looking(self) -> None:
        self.probe.begin(lambda: LOOK_S)

    @property
    def state(self) -> StandbyTrainer:
        self.probe.tasks.check()
        if self._view.is_started or self.probe.unanswered * ANSWER_S >= self._hung_after_s:
            return StandbyTrainer.HUNG  # or it was the trainer, of which only one may be
        if self._view.busy == PARKING and time.monotonic() - self._viewed_at > PARK_S:
            return StandbyTrainer.HUNG  # it answers, and its order will never end
        if self._view.pid == 0 or self._view.busy or not self.probe.is_fresh(LOOK_S + ANSWER_S):
            return StandbyTrainer.UNKNOWN
        return StandbyTrainer.PARKED if self._view.is_parked else StandbyTrainer.EMPTY

    async def can_take_over(self, *, empty_too: bool) -> bool:
        """Asked now: whether it is parked; `empty_too`: or has only been started."""
        asked_at, patience_s = time.monotonic(), 0.0
        while await self._answers() and not self._view.is_started:
            if self._view.busy != PARKING:
                return self._view.is_parked or empty_too
            patience_s = patience_s or (HURRIED_S if await self._hurries() else PARKING_S)
            if time.monotonic() > asked_at + patience_s:
                return False
            await asyncio.sleep(SOON_S)
        return False

    async def _hurries(self) -> bool:
        """Whether the one that is being parked has the usual priority from now on."""
        with contextlib.suppress(LauncherError):
            return bool(await answer(self.actor.hurry.remote(), within_s=PROMPT_S, of="the standby trainer"))
        return False

    async def _answers(self) -> bool:
        asked_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROMPT_S):
                await self.probe.refresh()
        return self.probe.answered_at >= asked_at

    async def change_places(self, ended: Any) -> Any:
        """Returns the actor that is the trainer from now on, in place of the one that has `ended`."""
        taken = self.actor
        self.actor = ended
        self._names = self._names[1], self._names[0]
        self._view = TrainerView(pid=0)
        self.probe.unanswered = 0
        self.probe.tasks.start(self._until_there())
        await self._took_over(self._names[0], taken)
        return taken

    async def _until_there(self) -> None:
        """Look out for the process that Ray starts in place of the one that ended: it is to be parked at once."""
        give_up_at = time.monotonic() + NEW_PROCESS_S
        while self._view.pid == 0 and time.monotonic() < give_up_at:
            await self.probe.refresh()
            await asyncio.sleep(NEW_S)

    async def park(self, overrides: Overrides, trainer: TrainerView) -> int:
        """Its process. Raises LauncherError. `trainer`: whose GPUs it is to have, and its ranks."""
        await self._until_new(is_needed=self.state is StandbyTrainer.HUNG)
        order = ("stand_by", dict(overrides), trainer.gpus, NICENESS, trainer.ranks)
        pid: int = await call_method(self.actor, *order, within_s=PARK_S, of="the standby trainer")
        await self.probe.refresh()
        return pid

    async def end(self) -> None:
        await self._until_new(is_needed=True)

    async def _until_new(self, *, is_needed: bool) -> None:
        if not is_needed:
            return
        old, give_up_at = self._view.pid, time.monotonic() + NEW_PROCESS_S
        await asyncio.to_thread(ray.kill, self.actor, no_restart=False)
        while self._view.pid in (0, old) or self._view.is_started:
            if time.monotonic() > give_up_at:
                raise TrainerError(f"no new process of {self._names[1]} within {NEW_PROCESS_S:g} s")
            await asyncio.sleep(SOON_S)
            await self.probe.refresh()

    async def _ask(self) -> tuple[Any, TrainerView]:
        actor = self.actor
        return actor, await answer(actor.view.remote(), within_s=ANSWER_S, of="the standby trainer")

    def _take_view(self, answered: tuple[Any, TrainerView]) -> None:
        actor, view = answered
        if actor is self.actor and view != self._view:  # else it was asked before they changed places
            self._view = view
            self._viewed_at = time.monotonic()
            self._changed.set()

    async def close(self) -> None:
        await self.probe.close()
