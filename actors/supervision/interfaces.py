"""What the Coordinator sees and does through: the seam between deciding and acting.

Behind it are Ray, processes and disks (actors/supervision/action_executor.py); a test puts a model of a run there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from launcher.base.messages import EvalReport, Incident, Rejection
from launcher.policy.actions import Action
from launcher.policy.checkpoint_status import CheckpointFacts
from launcher.policy.memory_backoff import MemorySettings, TriedSettings
from launcher.policy.observed import ServerFacts, TrainerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known now, without waiting for anybody. `evals`: held-out accuracies so far, for the last word.

    `rejections`: batches that were turned away since the last step. `monitor_silent_s`: for how long the HealthMonitor
    has been asked in vain.
    """

    servers: tuple[ServerFacts, ...]
    trainer: TrainerFacts
    checkpoints: tuple[CheckpointFacts, ...]
    memory: MemorySettings
    incident: Incident | None = None
    tried: tuple[TriedSettings, ...] = ()
    progress_at: float | None = None
    is_stopped: bool = False
    evals: tuple[EvalReport, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    monitor_silent_s: float = 0.0


Facts = Mapping[str, object]
"""Figures for the journal."""


class ClusterInterface(Protocol):
    """`changed` is set by the hands whenever a look would show something that should not wait for the next turn."""

    changed: asyncio.Event

    async def begin(self) -> None:
        """Adopt what lives, start what was never started, and return without waiting for it to be ready."""

    def look(self) -> Observation: ...

    def deadline_s(self, action: Action) -> float:
        """Within which `perform` must have ended."""

    async def perform(self, action: Action) -> Facts:
        """Do it, and return what there is to say of it. Raises LauncherError."""

    async def close(self) -> None:
        """Stop watching. What lives goes on living."""
