"""Watches the trainer: its process and its last view. launcher/policy/trainer_liveness.py judges them.

A look waits for nobody: neither a stopped trainer nor one that holds the interpreter delays it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from actors.cluster.node_identity import is_here
from actors.processes.process_tree import process_state
from launcher.base.messages import ServerState, TrainerView, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.trainer_liveness import (
    STEPS_KEPT,
    TrainerEvidence,
    TrainerLook,
    judge_trainer,
    observe_trainer,
)


class TrainerWatch:
    """One incarnation of the trainer at a time: another pid begins another."""

    def __init__(self, settings: HealthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._incarnation = ("", 0)
        self._evidence: TrainerEvidence | None = None
        self._step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step, self._step_at = -1, 0.0

    def look(self, view: TrainerView, *, heard_at: float, is_asked: bool) -> None:
        """`heard_at`: when it gave `view`. `is_asked`: another answer has been asked for and has not come."""
        now = self._clock()
        if (view.node, view.pid) != self._incarnation:
            self._incarnation, self._evidence = (view.node, view.pid), None
            self._step_s.clear()
            self._step = -1
        self._time_steps(view, now)
        state, cpu_s = process_state(view.pid) if is_here(view.node) else (None, 0.0)
        look = TrainerLook(
            at=now,
            state=state,
            cpu_s=cpu_s,
            pinged_at=heard_at,
            ping_waits=is_asked,
            progress=view.progress,
            waits_for=waits_for(view),
            median_step_s=median(self._step_s) if self._step_s else None,
            is_at_one_thing=view.phase == "checkpoint" or (view.phase == "publish" and bool(view.loading)),
        )
        evidence = self._evidence
        self._evidence = (
            TrainerEvidence(look=look) if evidence is None else observe_trainer(evidence, look, self._settings)
        )

    def verdict(self) -> Verdict:
        return judge_trainer(self._evidence, self._settings, self._clock())

    def _time_steps(self, view: TrainerView, now: float) -> None:
        """Steps seen while it was working throughout; a pause between two of them is none of its time."""
        if waits_for(view) or view.next_step < self._step:
            self._step = -1
        elif self._step < 0:
            self._step, self._step_at = view.next_step, now
        elif view.next_step > self._step:
            self._step_s.append((now - self._step_at) / (view.next_step - self._step))
            self._step, self._step_at = view.next_step, now


def waits_for(view: TrainerView) -> str:
    """What it waits for, by order or because no server is ready; "" where it has work."""
    if view.busy:
        return view.busy  # a checkpoint or a model of any size: its order's deadline counts
    if not (view.is_running or view.is_allowed):
        return "an order"
    serves = any(
        server.state is ServerState.READY
        and server.weight_version == view.policy_version
        and server.lineage in (None, view.lineage)
        for server in view.servers
    )
    if view.phase in ("rollout", "evaluate") and not serves:
        return "a server"
    return "the monitor" if view.is_at_gate else ""
