"""What a run's own files tell of its health, alive or dead: the rewards that stand, and the damage that stands.

An incident that touched the weights is over when it was mended, or when the trainer was restored to before it: then
the checkpoints that held it lie aside. What nobody noticed (the detectors were off, or the run was AReaL's) is found
here by the same detectors, over the rewards as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig, RewardHealthConfig
from launcher.policy.checkpoint_status import Damage
from launcher.policy.restore import first_damaged
from launcher.policy.reward_health import Level, RewardPoint, judge_rewards
from launcher.run_files.journal import number_of, read_lines
from launcher.run_files.run_paths import RunPaths

REWARD = "grpo_actor/task_reward"
RESTORED = frozenset({"trainer.restored", "trainer.loaded", "recovery.taken"})
STRIDE = 10
"""Steps between two judgements when a whole series is gone through; the onset is found by each that comes after it."""

KNOWN_CAUSES = frozenset(str(cause) for cause in Cause)

Line = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHealth:
    """`rewards`: of the steps that stand, in order. `last_step`: the last of them, -1 before the first."""

    rewards: tuple[RewardPoint, ...] = ()
    damage: Damage | None = None
    settings: RestoreConfig
    reward_settings: RewardHealthConfig

    @property
    def last_step(self) -> int:
        return self.rewards[-1].step if self.rewards else -1

    def reward_around(self, step: int, *, margin: int = 5) -> float | None:
        """The mean of the steps around one; None where there is none."""
        near = [p.mean for p in self.rewards if abs(p.step - step) <= margin and math.isfinite(p.mean)]
        return sum(near) / len(near) if near else None


def read_past(paths: RunPaths) -> RecordedHealth:
    """Of a run of ours. Files that are not there tell nothing."""
    settings = _section(paths.config, "restore", RestoreConfig)
    reward_settings = _section(paths.config, "reward_health", RewardHealthConfig)
    rewards, open_incidents = _replay(_merged(paths))
    damage = _first(open_incidents.values()) or seen_now(rewards, reward_settings)
    return RecordedHealth(rewards=tuple(rewards), damage=damage, settings=settings, reward_settings=reward_settings)


def _merged(paths: RunPaths) -> list[Line]:
    """Both files in the order of time: a restore takes back only the steps that were there by then."""
    lines: list[Line] = [*read_lines(paths.events), *read_lines(paths.metrics)]
    return sorted(lines, key=lambda line: number_of(line.get("time"), 0.0))


def _replay(lines: Iterable[Line]) -> tuple[list[RewardPoint], dict[int, Damage]]:
    rewards: list[RewardPoint] = []
    damages: dict[int, Damage] = {}
    for line in lines:
        step = line.get("global_step")
        match line.get("event"):
            case None if isinstance(step, int):
                _drop_from(rewards, step)
                rewards.append(_point(step, line))
            case event if event in RESTORED and isinstance(step, int):
                _drop_from(rewards, step + 1)
                damages = {number: one for number, one in damages.items() if one.first_step <= step}
            case "incident.began":
                if (damage := _damage_of(line)) is not None:
                    damages[_int(line.get("incident"))] = damage
            case "incident.ended" if line.get("is_mended"):
                damages.pop(_int(line.get("incident")), None)
            case _:
                pass
    return rewards, damages


def _drop_from(rewards: list[RewardPoint], step: int) -> None:
    while rewards and rewards[-1].step >= step:
        rewards.pop()


def _point(step: int, line: Line) -> RewardPoint:
    mean, low, high = (number_of(line.get(f"{REWARD}/{key}")) for key in ("avg", "min", "max"))
    return RewardPoint(step=step, mean=mean, low=low, high=high)


def _damage_of(event: Line) -> Damage | None:
    onset, cause = event.get("onset_step"), str(event.get("cause"))
    if not isinstance(onset, int) or cause not in KNOWN_CAUSES:
        return None
    incident = Incident(
        cause=Cause(cause),
        subject=str(event.get("subject")),
        reason=str(event.get("reason")),
        since=0.0,
        onset_step=onset,
    )
    first = first_damaged(incident)
    if first is None:
        return None
    source = f"incident {event.get('incident')}, {cause}"
    return Damage(onset_step=onset, first_step=first, reason=incident.reason, source=source)


def seen_now(rewards: Sequence[RewardPoint], settings: RewardHealthConfig) -> Damage | None:
    """What the detectors say of the series as it stands at its end."""
    verdict = judge_rewards(rewards, settings)
    return _collapse(verdict.onset_step, verdict.reason) if verdict.level is Level.BREAK else None


def seen_ever(rewards: Sequence[RewardPoint], settings: RewardHealthConfig) -> Damage | None:
    """The first collapse that the detectors would have found, had they watched a run that nobody watched."""
    ends = [*range(settings.warmup_steps, len(rewards), STRIDE), len(rewards)]
    longest = settings.window_steps + settings.baseline_steps
    for end in ends:
        damage = seen_now(rewards[max(0, end - longest) : end], settings)
        if damage is not None:
            return damage
    return None


def _collapse(onset_step: int | None, reason: str) -> Damage | None:
    if onset_step is None:
        return None
    incident = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason=reason, since=0.0, onset_step=onset_step)
    first = first_damaged(incident)
    assert first is not None
    return Damage(onset_step=onset_step, first_step=first, reason=reason, source="the rewards, as read now")


def _first(damages: Iterable[Damage]) -> Damage | None:
    return min(damages, key=lambda damage: damage.first_step, default=None)


def _section(file: Path, key: str, kind: Any) -> Any:
    """The run's own settings of a section; the defaults where it wrote none that can be read."""
    try:
        given = yaml.safe_load(file.read_bytes()).get(key)
        known = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known})
    except (OSError, yaml.YAMLError, AttributeError, TypeError):
        return kind()


def _int(value: object) -> int:
    return value if isinstance(value, int) else -1
