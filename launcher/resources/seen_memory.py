"""Compares what the plan put on each GPU with what NVML reports while the run trains.

Of this machine's GPUs only, and by what they hold more than before the run: NVML doesn't tell whose memory it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.resources.gpus import FoundGpus, find_gpus
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import RunPlan
from launcher.run_files.journal import Journal

AFTER_STEPS = 3
"""Steps of an attempt until the allocators of server and trainer have grown to what they keep."""
APART = 0.15
LOOK_EVERY_S = 5.0


class SeenMemory:
    """`look_if_due` records one event for each GPU after `AFTER_STEPS`, and one more where it rises above it later."""

    def __init__(
        self,
        plan: RunPlan | None,
        journal: Journal,
        *,
        read: Callable[[], FoundGpus] = find_gpus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plan`: made before anything was started, of this machine; of another one nothing is compared."""
        places = () if plan is None or plan.is_described or plan.n_nodes > 1 else plan.places
        self._planned = {place.gpu: place for place in places if place.gpu is not None}
        self._journal = journal
        self._read = read
        self._clock = clock
        self._looked_at = float("-inf")
        self._most: dict[int, int] = {}
        self._is_compared = False
        self._is_beyond: set[int] = set()

    def look_if_due(self, steps: int) -> None:
        """`steps`: that this attempt has done."""
        now = self._clock()
        if not self._planned or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        gpus = self._read().gpus
        for number, place in self._planned.items():
            if number < len(gpus):  # else: they can't be read now
                held = max(0, place.capacity - gpus[number].free)
                self._most[number] = max(self._most.get(number, 0), held)
        if steps >= AFTER_STEPS and self._most:
            for number in sorted(self._most):
                self._compare(number)
            self._is_compared = True

    def _compare(self, number: int) -> None:
        planned, most = self._planned[number].planned, self._most[number]
        more = most / planned - 1
        is_beyond = more > APART
        if self._is_compared and (not is_beyond or number in self._is_beyond):
            return
        self._is_beyond |= {number} if is_beyond else set()
        is_apart = abs(more) > APART
        reason = f"{planned / GIB:.1f} GiB were planned, {most / GIB:.1f} GiB seen at most ({more:+.0%})"
        self._journal.record(
            "memory.off_plan" if is_apart else "memory.compared",
            subject=f"GPU {number}",
            reason=f"{reason}: more than {APART:.0%} apart" if is_apart else reason,
            planned=planned,
            seen=most,
        )
