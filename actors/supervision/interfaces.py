"""The interface through which the Coordinator observes and acts.

Behind it are Ray, processes and disks (actors/supervision/action_executor.py); a test puts a model of a run there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from launcher.policy.actions import Action
from launcher.policy.observed import Observed

Facts = Mapping[str, object]
"""Figures for the journal."""


class ClusterInterface(Protocol):
    """`changed` is set whenever an observation would show something that should not wait for the next turn."""

    changed: asyncio.Event

    async def begin(self) -> None:
        """Adopt what runs, start what was never started, and return without waiting for it to be ready."""

    async def look(self, *, with_checkpoints: bool = False) -> Observed:
        """What is known now; the Coordinator adds what it remembers. `checkpoints` is None where they are not asked
        for, or can't be read now."""

    def deadline_s(self, action: Action) -> float:
        """Within which `perform` must have ended."""

    async def perform(self, action: Action) -> Facts:
        """Do it, and return figures for the journal. Raises LauncherError."""

    async def close(self) -> None:
        """Stop watching. Servers and trainer continue."""
