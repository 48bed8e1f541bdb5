"""Reads the health of a run from its own files: the rewards of the valid steps, and damage that was not repaired.

An incident that touched the weights is over when it was repaired, or when the trainer was restored to before it: then
the checkpoints that held it lie aside. What nobody noticed (the detectors were off, or the run was AReaL's) is found
here by the same detectors, over the rewards as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig, RewardHealthConfig
from launcher.policy.checkpoint_status import Damage
from launcher.policy.restore import first_damaged
from launcher.policy.reward_health import Level, RewardPoint, judge_rewards
from launcher.run_files.journal import Record, number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings

REWARD = "grpo_actor/task_reward"
RESTORED = frozenset({"trainer.restored", "trainer.loaded", "recovery.taken"})
STRIDE = 10
"""Steps between two judgements when a full series is judged; the onset is found by each that comes after it."""

KNOWN_CAUSES = frozenset(str(cause) for cause in Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHealth:
    """`rewards`: of the steps that count, in order. `last_step`: the last of them, -1 before the first."""

    rewards: tuple[RewardPoint, ...] = ()
    damage: Damage | None = None
    settings: RestoreConfig = field(default_factory=RestoreConfig)
    reward_settings: RewardHealthConfig = field(default_factory=RewardHealthConfig)

    @property
    def last_step(self) -> int:
        return self.rewards[-1].step if self.rewards else -1

    def reward_around(self, step: int, *, margin: int = 5) -> float | None:
        """The mean of the steps around one; None where there is none."""
        near = [p.mean for p in self.rewards if abs(p.step - step) <= margin and math.isfinite(p.mean)]
        return sum(near) / len(near) if near else None


def read_health(paths: RunPaths) -> RecordedHealth:
    """Of a run of ours. Missing files are ignored."""
    settings = _section(paths.config, "restore", RestoreConfig)
    reward_settings = _section(paths.config, "reward_health", RewardHealthConfig)
    # In the order of time: a restore undoes only the steps that existed by then.
    lines: list[Record] = [*read_lines(paths.events), *read_lines(paths.metrics)]
    rewards, damages, base = _replay(sorted(lines, key=lambda line: number_of(line.get("time"), 0.0)))
    comparable = [point for point in rewards if point.step >= base]
    damage = min(damages, key=lambda one: one.first_step, default=None) or damage_now(comparable, reward_settings)
    return RecordedHealth(rewards=tuple(rewards), damage=damage, settings=settings, reward_settings=reward_settings)


def _replay(lines: Iterable[Record]) -> tuple[list[RewardPoint], list[Damage], int]:
    """Rewards and damages that stand, and the step from which on rewards are compared: new prompts may be harder."""
    rewards: list[RewardPoint] = []
    base = 0
    damages: dict[object, Damage] = {}
    for line in lines:
        step, event, incident = line.get("global_step"), line.get("event"), line.get("incident")
        if event is None and isinstance(step, int):
            _drop_from(rewards, step)
            rewards.append(reward_point(line, step))
        elif event in RESTORED and isinstance(step, int):
            _drop_from(rewards, step + 1)
            base = base if base <= step else 0
            damages = {number: one for number, one in damages.items() if one.first_step <= step}
        elif event == "reward.rebased" and isinstance(step, int):
            base = step
        elif event == "incident.began":
            cause, onset = str(line.get("cause")), line.get("onset_step")
            found = _damage(cause, onset, str(line.get("reason")), f"incident {incident}, {cause}")
            if found is not None:
                damages[incident] = found
        elif event == "incident.ended" and line.get("is_mended"):
            damages.pop(incident, None)
    return rewards, list(damages.values()), base


def reward_point(line: Record, step: int) -> RewardPoint:
    """The rewards of a step, from its line of metrics.jsonl; NaN where it has none."""
    mean, low, high = (number_of(line.get(f"{REWARD}/{key}")) for key in ("avg", "min", "max"))
    return RewardPoint(step=step, mean=mean, low=low, high=high)


def _drop_from(rewards: list[RewardPoint], step: int) -> None:
    while rewards and rewards[-1].step >= step:
        rewards.pop()


def _damage(cause: str, onset_step: object, reason: str, source: str) -> Damage | None:
    """None where no weights were touched."""
    if not isinstance(onset_step, int) or cause not in KNOWN_CAUSES:
        return None
    incident = Incident(cause=Cause(cause), subject="policy", reason=reason, since=0.0, onset_step=onset_step)
    first = first_damaged(incident)
    return None if first is None else Damage(onset_step=onset_step, first_step=first, reason=reason, source=source)


def damage_now(rewards: Sequence[RewardPoint], settings: RewardHealthConfig) -> Damage | None:
    """The detectors' verdict on the series at its end."""
    verdict = judge_rewards(rewards, settings)
    if verdict.level is not Level.BREAK:
        return None
    return _damage(Cause.REWARD_COLLAPSE, verdict.onset_step, verdict.reason, "the rewards, as read now")


def damage_ever_seen(rewards: Sequence[RewardPoint], settings: RewardHealthConfig) -> Damage | None:
    """The first collapse that the detectors would have found, had they watched a run that nobody watched."""
    longest = settings.window_steps + settings.baseline_steps
    for end in (*range(settings.warmup_steps, len(rewards), STRIDE), len(rewards)):
        damage = damage_now(rewards[max(0, end - longest) : end], settings)
        if damage is not None:
            return damage
    return None


def _section(file: Path, key: str, kind: Any) -> Any:
    """The run's own settings of a section; the defaults where it wrote none that can be read."""
    given, known = read_settings(file).get(key), {field.name for field in fields(kind)}
    return kind(**{name: given[name] for name in known & given.keys()}) if isinstance(given, dict) else kind()
