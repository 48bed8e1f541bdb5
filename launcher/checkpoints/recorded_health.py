"""Reads the health of a run from its own files: the rewards of the valid steps, and damage that was not repaired.

An incident that touched the weights is over when it was repaired, or when the trainer was restored to before it: then
the checkpoints that held it lie aside. One whose step was never trained touched none (its prompts could not be scored,
and the run ended). What nobody noticed (the detectors were off) is found in the rewards as they
are. Of AReaL's runs the evidence comes from their logs (launcher/diagnosis/judging/step_history.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base.messages import Cause, Incident
from launcher.base.wording import lines_not_read
from launcher.checkpoints.health_evidence import HealthEvidence, SeenSteps, judge
from launcher.checkpoints.onset import find_falls, standing
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import Damage
from launcher.policy.restore import first_damaged
from launcher.run_files.journal import Record, number_of, read_lines
from launcher.run_files.run_order import in_order
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings
from launcher.run_log.file_follower import unreadable

REWARD = "grpo_actor/task_reward/avg"
RESTORED = frozenset({"trainer.restored", "trainer.loaded", "recovery.taken"})
COMMITTED = "checkpoint.committed"
TOLD = RESTORED | {COMMITTED, "reward.rebased", "incident.began", "incident.ended"}

KNOWN_CAUSES = frozenset(str(cause) for cause in Cause)


def read_health(paths: RunPaths) -> HealthEvidence:
    """Of a run of ours. What can't be read is named in it."""
    settings = _section(paths.config, "restore", RestoreConfig)
    unread = tuple(f"{path.name}: {why}" for path in (paths.events, paths.metrics) if (why := unreadable(path)))
    files = {path: read_lines(path) for path in (paths.events, paths.metrics) if not unreadable(path)}
    events = [event for event in files.get(paths.events, ()) if event.get("event") in TOLD]
    rewards, damages, base, newest = _replay(in_order(events, files.get(paths.metrics, ())))
    seen = SeenSteps(
        steps=np.array([step for step, _ in rewards], dtype=np.int64),
        rewards=np.array([reward for _, reward in rewards]),
        origins=np.zeros(len(rewards), dtype=np.int64),
        files=(str(paths.metrics),),
        unread=unread,
        passed_over=tuple(
            lines_not_read(file.skipped, file.path, file.first_skipped) for file in files.values() if file.skipped
        ),
    )
    if rewards and not seen.unread and not seen.passed_over:  # else a step may be missing that was trained on it
        damages = [one for one in damages if one.first_step <= newest]
    if damages:
        damage = min(damages, key=lambda one: one.first_step)
        return HealthEvidence(seen=seen, damage=damage, healthy=np.isfinite(seen.rewards), settings=settings)
    first = int(np.searchsorted(seen.steps, base))
    fall = standing(find_falls(seen.rewards[first:]))
    return judge(seen, None if fall is None else fall.moved(first), settings, source="the rewards, as read now")


def _replay(lines: Iterable[Record]) -> tuple[list[tuple[int, float]], list[Damage], int, int]:
    """Rewards and damages that stand, the step from which on rewards are compared (new prompts may be harder), and the
    newest step that was trained: a step's line may be lost where its checkpoint is there."""
    rewards: list[tuple[int, float]] = []
    base, newest = 0, -1
    damages: dict[object, Damage] = {}
    for line in lines:
        step, event, incident = line.get("global_step"), line.get("event"), line.get("incident")
        if event is None and isinstance(step, int):
            _drop_from(rewards, step)
            rewards.append((step, number_of(line.get(REWARD))))
            newest = max(newest, step)
        elif event == COMMITTED and isinstance(step, int):
            newest = max(newest, step)
        elif event in RESTORED and isinstance(step, int):
            _drop_from(rewards, step + 1)
            newest = step
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
    return rewards, list(damages.values()), base, newest


def _drop_from(rewards: list[tuple[int, float]], step: int) -> None:
    while rewards and rewards[-1][0] >= step:
        rewards.pop()


def _damage(cause: str, onset_step: object, reason: str, source: str) -> Damage | None:
    """None where no weights were touched."""
    if not isinstance(onset_step, int) or cause not in KNOWN_CAUSES:
        return None
    incident = Incident(cause=Cause(cause), subject="policy", reason=reason, since=0.0, onset_step=onset_step)
    first = first_damaged(incident)
    return None if first is None else Damage(onset_step=onset_step, first_step=first, reason=reason, source=source)


def _section(file: Path, key: str, kind: Any) -> Any:
    """The run's own settings of a section; the defaults where it wrote none that can be read."""
    given, known = read_settings(file).get(key), {field.name for field in fields(kind)}
    return kind(**{name: given[name] for name in known & given.keys()}) if isinstance(given, dict) else kind()
