"""The HealthMonitor as the Coordinator's hands hold it: its last word, and nothing where it has been silent too long.

Consumes: the monitor's `verdicts()`. A monitor that hangs or restarts delays nobody; its word grows old and is
dropped, and unknown is never a reason to kill (P7).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.actor_calls import answer
from launcher.errors import LauncherError
from launcher.messages import Incident, Verdict

ANSWER_S = 2.0
LOOK_S = 0.25
FRESH_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorWord:
    """`servers` by name and generation. `incident`: what the steps that stand show."""

    servers: Mapping[tuple[str, int], Verdict] = field(default_factory=dict)
    trainer: Verdict | None = None
    incident: Incident | None = None


class MonitorLink:
    def __init__(self, actor: Any, *, changed: asyncio.Event) -> None:
        self._actor = actor
        self._changed = changed
        self._word: MonitorWord | None = None
        self._heard_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def word(self) -> MonitorWord | None:
        return self._word if time.monotonic() - self._heard_at <= FRESH_S else None

    def begin_looking(self) -> None:
        self._task = asyncio.create_task(self._look_on())

    async def _look_on(self) -> None:
        while True:
            try:
                word: MonitorWord = await answer(
                    self._actor.verdicts.remote(), within_s=ANSWER_S, of="the HealthMonitor"
                )
            except LauncherError:
                await asyncio.sleep(LOOK_S)  # it ages, and `word` says so
                continue
            if word != self._word:
                self._changed.set()
            self._word, self._heard_at = word, time.monotonic()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
