"""For how long has the run taken no step although nobody has a reason to wait? The last resort (`plan` then halts, and
another attempt begins): each failure that is known has a repair with a budget of its own, but an order that fails again
and again, or a process that answers questions and does nothing, would else stand there until a person looks.

Time counts while the trainer can't step: it is paused, has ended, has loaded nothing, or no server has its weights. One
that can step is judged by launcher/policy/trainer_liveness.py. It doesn't count while somebody is waited for, by rules
that have their own patience: a person, a disk, a node, a reward function, the HealthMonitor.
"""

from __future__ import annotations

from launcher.base.messages import Cause, Health
from launcher.config.schema import RunConfig
from launcher.policy.observed import Observed, can_serve, is_unschedulable
from launcher.policy.trainer_liveness import MOST_BETWEEN_LOOKS_S

STARTS = 2
"""A start that fails at its deadline is no standstill: the next one may succeed."""


class StandstillClock:
    """Of one Coordinator: what its predecessor saw stand still is not counted."""

    def __init__(self) -> None:
        self._next_step: int | None = None
        self._at = 0.0
        self._seconds = 0.0

    def note(self, seen: Observed, now: float) -> float:
        """One more look. Returns the seconds that count, since the last step that was taken or gone back to."""
        elapsed_s = min(now - self._at, MOST_BETWEEN_LOOKS_S)
        self._at = now
        if seen.trainer.next_step != self._next_step:
            self._next_step = seen.trainer.next_step
            self._seconds = 0.0
        elif not _can_step(seen) and not _waits_for_somebody(seen):
            self._seconds += elapsed_s
        return self._seconds


def longest_standstill_s(config: RunConfig) -> float:
    """From which on another attempt is begun."""
    start_s = max(config.rollout.setup_timeout, config.health.trainer_first_s) + config.restart.wait_max_s
    return STARTS * start_s


def _can_step(seen: Observed) -> bool:
    trainer = seen.trainer
    is_there = trainer.is_loaded and trainer.verdict.health is not Health.DEAD
    return is_there and not trainer.is_paused and can_serve(seen)


def _waits_for_somebody(seen: Observed) -> bool:
    has_no_node = seen.trainer.unschedulable_since is not None or (
        bool(seen.servers) and all(is_unschedulable(server) for server in seen.servers)
    )
    waits_for_reward = seen.incident is not None and seen.incident.cause is Cause.VERIFIER_BROKEN
    return (
        bool(seen.hold_reason)
        or seen.disk is not None
        or has_no_node
        or waits_for_reward
        or seen.monitor_silent_s > 0
        or seen.door_silent_s > 0
        or seen.trainer.waits_itself
    )
