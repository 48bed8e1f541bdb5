"""Do the rewards show that something broke? And what: the reward function, a server, or the policy itself.

Two detectors over the run's valid steps: a streak of steps with nothing but zeros, and a fall against the run's own
baseline (launcher/policy/change_point.py). They find *that*; `find_cause` finds *what*, in this order:
known answers scored wrongly accuse the reward function, a server with a fault of its own since the onset accuses
that server, and only what neither explains is a collapse of the policy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import CanaryVerdict
from launcher.policy.change_point import find_fall

SAME_TIME_STEPS = 3
"""How far the estimated onset of a fall may be from the fault that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPoint:
    """One step's rewards: `mean`, `low` and `high` over its rollouts."""

    step: int
    mean: float
    low: float
    high: float

    @property
    def is_zero(self) -> bool:
        return self.low == self.high == 0


class Level(enum.StrEnum):
    """SOUND: continue. ALERT: report it, continue. BREAK: no further optimizer step before the cause is known."""

    SOUND = "SOUND"
    ALERT = "ALERT"
    BREAK = "BREAK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardVerdict:
    """`onset_step`: the first step that shows it, as estimated; None where SOUND."""

    level: Level
    reason: str
    onset_step: int | None = None


def judge_rewards(
    series: Sequence[RewardPoint], settings: RewardHealthConfig, *, restored_step: int | None = None
) -> RewardVerdict:
    """The verdict on the run's valid steps, oldest first (of a step that was repeated, only its last result).

    `restored_step`: of the last restore, if any; for `probation_steps` after it thresholds are tighter.
    """
    if not series:
        return RewardVerdict(level=Level.SOUND, reason="no step yet")
    if not math.isfinite(series[-1].mean):
        reason = f"mean reward {series[-1].mean:.3g}"
        return RewardVerdict(level=Level.BREAK, reason=reason, onset_step=series[-1].step)
    factor = _tightening(series[-1].step, restored_step, settings)
    verdicts = (_judge_fall(series, settings, factor), _judge_zeros(series, settings, factor))
    broken = [verdict for verdict in verdicts if verdict.level is Level.BREAK]
    alerts = [verdict for verdict in verdicts if verdict.level is Level.ALERT]
    return next(iter([*broken, *alerts]), RewardVerdict(level=Level.SOUND, reason=_recent_text(series)))


def _tightening(step: int, restored_step: int | None, settings: RewardHealthConfig) -> float:
    on_probation = restored_step is not None and step - restored_step <= settings.probation_steps
    return settings.probation_factor if on_probation else 1.0


def _judge_zeros(series: Sequence[RewardPoint], settings: RewardHealthConfig, factor: float) -> RewardVerdict:
    streak = 0
    for point in reversed(series):
        if not point.is_zero:
            break
        streak += 1
    limits = ((Level.BREAK, settings.zero_breaker_steps), (Level.ALERT, settings.zero_alert_steps))
    for level, steps in limits:
        if steps is not None and streak >= max(1, math.floor(steps * factor)):
            reason = f"every reward was 0 for {streak} steps in a row"
            return RewardVerdict(level=level, reason=reason, onset_step=series[-streak].step)
    return RewardVerdict(level=Level.SOUND, reason="")


def _judge_fall(series: Sequence[RewardPoint], settings: RewardHealthConfig, factor: float) -> RewardVerdict:
    if settings.fall_threshold is None:
        return RewardVerdict(level=Level.SOUND, reason="")
    recent = series[-(settings.window_steps + settings.baseline_steps) :]
    spread = max(point.high for point in recent) - min(point.low for point in recent)
    fall = find_fall(
        [point.mean for point in recent],
        settings,
        reward_range=spread or 1.0,
        threshold=settings.fall_threshold * factor,
    )
    if fall is None:
        return RewardVerdict(level=Level.SOUND, reason="")
    onset_step = recent[fall.onset].step
    reason = (
        f"mean reward fell from {fall.before:.3g} to {fall.after:.3g} at about step {onset_step} "
        f"({fall.score:.1f} standard errors, noise {fall.noise:.2g})"
    )
    return RewardVerdict(level=Level.BREAK, reason=reason, onset_step=onset_step)


def _recent_text(series: Sequence[RewardPoint]) -> str:
    recent = [point.mean for point in series[-10:]]
    return f"mean reward {sum(recent) / len(recent):.3g} over the last {len(recent)} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFault:
    """What was wrong with a server, and the step under way when it began."""

    name: str
    cause: Cause
    since_step: int


def find_cause(
    rewards: RewardVerdict, canaries: CanaryVerdict, faults: Sequence[ServerFault], *, since: float
) -> Incident | None:
    """What broke, or None. `since`: when it was first seen, on the clock of whoever decides."""
    onsets = [onset for onset in (canaries.onset_step, rewards.onset_step) if onset is not None]
    guilty = _guilty_server(faults, rewards.onset_step)
    if canaries.is_broken:
        cause, subject, reason = Cause.VERIFIER_BROKEN, "reward", canaries.reason
    elif rewards.level is not Level.BREAK:
        return None
    elif guilty is not None:
        cause, subject, reason = guilty.cause, guilty.name, rewards.reason
    else:
        cause, subject, reason = Cause.REWARD_COLLAPSE, "policy", rewards.reason
    return Incident(
        cause=cause,
        subject=subject,
        reason=reason,
        since=since,
        onset_step=min(onsets),
        evidence={"canaries": canaries.reason, "rewards": rewards.reason},
    )


def _guilty_server(faults: Sequence[ServerFault], onset_step: int | None) -> ServerFault | None:
    """A fault that began when the rewards fell. One of another time explains nothing: servers fail every day."""
    if onset_step is None:
        return None
    near = [fault for fault in faults if abs(fault.since_step - onset_step) <= SAME_TIME_STEPS]
    return min(near, key=lambda fault: abs(fault.since_step - onset_step), default=None)
