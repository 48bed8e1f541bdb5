"""What a run's own files record: its state, servers, incidents and steps. Read once, before any process is queried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

from launcher.base.errors import StorageError
from launcher.policy.reward_health import RewardPoint
from launcher.reporting.event_lines import what_happened
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from launcher.run_log.file_follower import check_readable, unreadable
from launcher.run_log.last_attempt import LastAttempt
from launcher.run_log.run_log import RunLog, RunLogFiles
from launcher.run_log.step_line import StepLine


@dataclass(slots=True, kw_only=True)
class RecordedRun(LastAttempt):
    """The last attempt by its journal. `status`: "" until the run has ended. `incidents`: those that are open.
    `not_read`: of each file how many lines say nothing."""

    status: str = ""
    reason: str = ""
    incidents: dict[int, str] = field(default_factory=dict)
    total_steps: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()

    @classmethod
    def of(cls, log: RunLog, settings: Mapping[str, object], not_read: tuple[str, ...] = ()) -> Self:
        last = log.last_attempt
        status, reason = log.last_word()
        return cls(
            **{one.name: getattr(last, one.name) for one in dataclasses.fields(last)},
            status=status,
            reason=reason,
            incidents={
                number: f"incident {number}: {what_happened(began)}" for number, began in last.open_incidents.items()
            },
            total_steps=log.total_steps(),
            settings=settings,
            not_read=not_read,
        )

    def setting(self, key: str) -> object:
        """As the run wrote it down; None where it didn't."""
        return setting_of(self.settings, key)


def read_view(paths: RunPaths) -> RecordedRun:
    return read_run(paths)[0]


def read_run(paths: RunPaths) -> tuple[RecordedRun, LastSteps]:
    """Raises JournalError where the journal can't be read."""
    files = RunLogFiles(paths)
    log = files.refresh(has_ended=True)
    check_readable(paths.events)
    return RecordedRun.of(log, read_run_settings(paths), files.not_read()), last_steps(log, paths.metrics)


def read_run_settings(paths: RunPaths) -> Mapping[str, object]:
    """Those of the last attempt that had others than the first. Raises StorageError."""
    found = list(paths.logs.glob("config.attempt*.yaml"))
    if lost := [path for path in found if not path.exists()]:
        raise StorageError(f"{lost[0]} is a link to a file that is not there", "remove it, or put that file back")
    files = sorted(found, key=lambda path: path.stat().st_mtime)
    return read_settings(files[-1] if files else paths.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSteps:
    """The current steps. `last_at`: when a step was committed last. `unread`: why none could be read."""

    last_step: int | None
    last_at: float | None
    usual_step_s: float | None
    rewards: tuple[RewardPoint, ...]
    unread: str = ""


def last_steps(log: RunLog, metrics: Path) -> LastSteps:
    standing, _ = log.standing()
    seconds = [line.step_s for line in standing if math.isfinite(line.step_s)]
    return LastSteps(
        last_step=standing[-1].step if standing else None,
        last_at=log.steps[-1].time or None if log.steps else None,
        usual_step_s=median(seconds) if seconds else None,
        rewards=_rewards(standing),
        unread=f"{metrics.name} {why}" if (why := unreadable(metrics)) else "",
    )


def _rewards(steps: Sequence[StepLine]) -> tuple[RewardPoint, ...]:
    """Where only a step's mean is recorded, it counts as each of its rewards."""
    points: list[RewardPoint] = []
    for line in steps:
        if not math.isfinite(line.reward):
            continue
        low, high = line.task_reward_min, line.task_reward_max
        if not (math.isfinite(low) and math.isfinite(high)):
            low = high = line.reward
        points.append(RewardPoint(step=line.step, mean=line.reward, low=low, high=high))
    return tuple(points)
