"""Reads the health of a run from its own files: the rewards of the valid steps, and damage that was not repaired.

An incident that touched the weights is over when it was repaired, or when the trainer was restored to before it: then
the checkpoints that held it lie aside. One whose step was never trained touched none (its prompts could not be scored,
and the run ended). What nobody noticed (the detectors were off) is found in the rewards as they
are. Of AReaL's runs the evidence comes from their logs (launcher/diagnosis/judging/step_history.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base.messages import Cause, Incident
from launcher.checkpoints.health_evidence import HealthEvidence, SeenSteps, judge
from launcher.checkpoints.onset import find_falls, standing
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import Damage
from launcher.policy.restore import first_damaged
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings
from launcher.run_log.file_follower import unreadable
from launcher.run_log.run_log import RunLog, RunLogFiles

KNOWN_CAUSES = frozenset(str(cause) for cause in Cause)


def read_health(paths: RunPaths) -> HealthEvidence:
    """Of a run of ours. What can't be read is named in it."""
    settings = _section(paths.config, "restore", RestoreConfig)
    unread = tuple(f"{path.name}: {why}" for path in (paths.events, paths.metrics) if (why := unreadable(path)))
    files = RunLogFiles(paths)
    log = files.refresh(has_ended=True)
    standing_steps, _ = log.standing()
    seen = SeenSteps(
        steps=np.array([line.step for line in standing_steps], dtype=np.int64),
        rewards=np.array([line.task_reward for line in standing_steps]),
        origins=np.zeros(len(standing_steps), dtype=np.int64),
        files=(str(paths.metrics),),
        unread=unread,
        passed_over=files.not_read(),
    )
    damages = list(_damages(log))
    if standing_steps and not seen.unread and not seen.passed_over:  # else a step may be missing that was trained on it
        damages = [one for one in damages if one.first_step <= log.newest_step()]
    if damages:
        damage = min(damages, key=lambda one: one.first_step)
        return HealthEvidence(seen=seen, damage=damage, healthy=np.isfinite(seen.rewards), settings=settings)
    first = int(np.searchsorted(seen.steps, log.rebased_step))
    fall = standing(find_falls(seen.rewards[first:]))
    return judge(seen, None if fall is None else fall.moved(first), settings, source="the rewards, as read now")


def _damages(log: RunLog) -> Iterator[Damage]:
    """Of incidents that are not over, where no restore since went back to before their damage."""
    for one in log.incidents.values():
        if one.began is None or one.is_mended:
            continue
        cause, onset = str(one.began.get("cause")), one.began.get("onset_step")
        found = _damage(cause, onset, str(one.began.get("reason")), f"incident {one.number}, {cause}")
        if found is not None and (one.restored_to is None or found.first_step <= one.restored_to):
            yield found


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
