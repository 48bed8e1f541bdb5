"""Watches what another project's trainer learns: damage in its steps, alerts, and whether a restore was borne out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from actors.foreign.completion_counts import compared
from actors.supervision.run_history import RunHistory
from launcher.adapters.foreign_health import find_damage, points_of, restore_verdict
from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.incident_policy import ENVIRONMENT
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.policy.reward_health import Level, RewardVerdict, judge_rewards
from launcher.run_files.journal import Record


class LearningWatch:
    """`find` after each step, with the current lines of metrics.jsonl. `owes_proof`: whether what was restored is at
    fault is not known yet. `onset_step`: of the damage that it went back from."""

    def __init__(self, settings: RewardHealthConfig, history: RunHistory) -> None:
        self._settings = settings
        self._history = history
        onsets = [one for one in history.attempts if one.onset_step is not None]
        self._restored_step = onsets[-1].restored_step if onsets else None
        self.onset_step: int | None = None
        self.owes_proof = False
        self._is_alerted = False

    def restored(self, step: int, onset_step: int | None) -> None:
        """The next step begins with the weights of a checkpoint from before an onset."""
        self._restored_step = step
        self.onset_step = onset_step
        self.owes_proof = step != FIRST_WEIGHTS

    def find(self, lines: Sequence[Record], now: float) -> Incident | None:
        """What the steps show of the learning; OUTSIDE_WEIGHTS where the first ones after a restore show that something
        else has changed."""
        points, restored = points_of(lines), self._restored_step
        if self.owes_proof and restored is not None:
            is_decided, why = restore_verdict(points, restored, self._settings)
            if why:
                facts: dict[str, object] = {"onset_step": self.onset_step, "global_step": restored}
                self._history.event("health.outside_weights", subject=ENVIRONMENT, reason=why, **facts)
                return Incident(cause=Cause.OUTSIDE_WEIGHTS, subject=ENVIRONMENT, reason=why, since=now)
            self.owes_proof = not is_decided
        verdict = RewardVerdict(level=Level.SOUND, reason="it is not known yet whether the restored weights are sound")
        if not self.owes_proof:
            verdict = judge_rewards(points, self._settings, restored_step=restored)
        is_known = not self.owes_proof and verdict.level is not Level.BREAK
        is_known &= verdict.level is Level.ALERT or bool(points and not points[-1].is_zero)  # else nothing has ended
        if is_known and (verdict.level is Level.ALERT) != self._is_alerted:
            self._is_alerted = not self._is_alerted
            name = "reward.alert" if self._is_alerted else "reward.alert_over"
            self._history.event(name, subject="reward", reason=verdict.reason, global_step=points[-1].step)
        found = find_damage(lines, verdict, self._settings, since=now)
        if found is None:
            return None
        if found.onset_step is not None and (meanwhile := compared(lines, found.onset_step)):
            found = dataclasses.replace(found, reason=f"{found.reason}; {meanwhile}")
        self._history.event(
            f"health.{found.cause}", subject=found.subject, reason=found.reason, onset_step=found.onset_step
        )
        return found
