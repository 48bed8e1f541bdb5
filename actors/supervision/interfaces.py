"""The interface through which the Coordinator observes and acts.

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
from launcher.policy.disk_health import DiskTrouble
from launcher.policy.memory_backoff import MemorySettings, TriedSettings
from launcher.policy.observed import ServerFacts, StandbyTrainer, TrainerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known now. `evals`: held-out accuracies so far, for the run's outcome.

    `is_judged`: as of what a plan is made from. `rejections`: batches that were rejected since the last step.
    `monitor_silent_s`: for how long the HealthMonitor has been asked in vain. `disk`: what keeps the run from writing.
    `standby_trainer`: the trainer's other process.
    """

    servers: tuple[ServerFacts, ...]
    trainer: TrainerFacts
    checkpoints: tuple[CheckpointFacts, ...]
    memory: MemorySettings
    incident: Incident | None = None
    is_judged: bool = True
    tried: tuple[TriedSettings, ...] = ()
    progress_at: float | None = None
    is_stopped: bool = False
    evals: tuple[EvalReport, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    monitor_silent_s: float = 0.0
    disk: DiskTrouble | None = None
    standby_trainer: StandbyTrainer = StandbyTrainer.NONE


Facts = Mapping[str, object]
"""Figures for the journal."""


class ClusterInterface(Protocol):
    """`changed` is set whenever an observation would show something that should not wait for the next turn."""

    changed: asyncio.Event

    async def begin(self) -> None:
        """Adopt what runs, start what was never started, and return without waiting for it to be ready."""

    async def look(self) -> Observation: ...

    def deadline_s(self, action: Action) -> float:
        """Within which `perform` must have ended."""

    async def perform(self, action: Action) -> Facts:
        """Do it, and return figures for the journal. Raises LauncherError."""

    async def close(self) -> None:
        """Stop watching. Servers and trainer continue."""
