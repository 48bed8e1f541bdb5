"""What the person at the screen is told of a run that goes on: `RunView`, and how it is gathered from step reports.

Pure: the driver hands in what it heard, with the time; display.py draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from launcher.base.messages import EvalReport, ServerInfo, StepReport, TrainerStatus

REWARD = "rollout/reward"
STEP_SECONDS = "timeperf/step_s"
TOKENS_PER_S = "rollout/tokens_per_s"

MEAN_OVER_STEPS = 10
WINDOWS_ACROSS = 50
"""A curve's mean is over 10 steps, but never over less than this part of a long run: noise would hide it."""
STEPS_REMEMBERED = 100
"""More than any terminal has columns for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment. `rewards` and `step_seconds` are of the last steps, the newest last.

    A reward is NaN where its step had none. `steps_done` counts the committed steps of all attempts, `epoch` from 1;
    `elapsed_s` is the time since this attempt began.
    """

    experiment_name: str
    trial_name: str
    attempt: int
    steps_done: int
    total_steps: int
    epoch: int
    total_epochs: int
    phase: str
    seconds_in_phase: float
    policy_version: int
    elapsed_s: float
    rewards: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    servers: tuple[ServerInfo, ...] = ()
    evals: tuple[EvalReport, ...] = ()
    last_event: str = ""

    @property
    def reward(self) -> float | None:
        """Of the last step."""
        return None if not self.rewards or math.isnan(self.rewards[-1]) else self.rewards[-1]

    @property
    def recent_reward(self) -> float | None:
        """The mean of the last steps."""
        recent = [reward for reward in self.rewards[-MEAN_OVER_STEPS:] if not math.isnan(reward)]
        return fmean(recent) if recent else None

    @property
    def left_s(self) -> float | None:
        """The remaining steps at the median pace of the last ones; None before there is one."""
        return median(self.step_seconds) * (self.total_steps - self.steps_done) if self.step_seconds else None


class Progress:
    """Gathers step reports of one attempt into views. A report of an earlier step takes later ones back (restore)."""

    def __init__(
        self, *, experiment_name: str, trial_name: str, attempt: int, total_epochs: int, started: float
    ) -> None:
        """`started` is a monotonic time, as `now` of `view`."""
        self._names = (experiment_name, trial_name)
        self._attempt = attempt
        self._total_epochs = total_epochs
        self._started = started
        self._reports: list[StepReport] = []
        self._last_event = ""

    def add(self, reports: Sequence[StepReport]) -> None:
        """Take in committed steps, in the order in which they were committed."""
        for report in reports:
            kept = [earlier for earlier in self._reports if earlier.global_step < report.global_step]
            self._reports = [*kept, report][-STEPS_REMEMBERED:]

    def note(self, event: str) -> None:
        """The last thing that happened, in a few words."""
        self._last_event = event

    def view(
        self, status: TrainerStatus, *, servers: Sequence[ServerInfo], evals: Sequence[EvalReport] = (), now: float
    ) -> RunView:
        metrics = [report.metrics for report in self._reports]
        tokens = [line[TOKENS_PER_S] for line in metrics[-MEAN_OVER_STEPS:] if TOKENS_PER_S in line]
        return RunView(
            experiment_name=self._names[0],
            trial_name=self._names[1],
            attempt=self._attempt,
            steps_done=status.next_step,
            total_steps=status.total_steps,
            epoch=self._epoch(status),
            total_epochs=self._total_epochs,
            phase=status.phase,
            seconds_in_phase=status.seconds_in_phase,
            policy_version=status.policy_version,
            elapsed_s=now - self._started,
            rewards=tuple(line.get(REWARD, math.nan) for line in metrics),
            step_seconds=tuple(_step_seconds(metrics)),
            tokens_per_s=median(tokens) if tokens else None,
            servers=tuple(servers),
            evals=tuple(evals),
            last_event=self._last_event,
        )

    def _epoch(self, status: TrainerStatus) -> int:
        """Of the next step, or of the last one where there is no next."""
        step = min(status.next_step, status.total_steps - 1)
        return max(step, 0) // max(status.steps_per_epoch, 1) + 1


def mean_window(steps: int) -> int:
    """Over how many steps the mean of a reward curve of `steps` is taken."""
    return max(MEAN_OVER_STEPS, steps // WINDOWS_ACROSS)


def _step_seconds(metrics: Sequence[Mapping[str, float]]) -> list[float]:
    return [line[STEP_SECONDS] for line in metrics if math.isfinite(line.get(STEP_SECONDS, math.nan))]
