"""What a terminal shows of a live run: `RunView`, and `RunProgress`, which gathers it from committed steps.

Pure: the caller passes what it knows, with the time; terminal_panel.py draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from launcher.base.messages import EvalReport, ServerInfo, TrainerStatus
from launcher.run_files.journal import Record
from launcher.run_log.step_line import StepLine, standing_steps

MEAN_OVER_STEPS = 10
STEPS_REMEMBERED = 100
"""More than any terminal has columns for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment. `rewards` and `step_seconds` are of the last steps, the newest last.

    A reward is NaN where its step had none. `elapsed_s` is the time since this attempt began.
    """

    title: str
    attempt: int
    status: TrainerStatus
    elapsed_s: float
    rewards: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    servers: tuple[ServerInfo, ...] = ()
    evals: tuple[EvalReport, ...] = ()
    last_event: str = ""

    @property
    def steps_done(self) -> int:
        """The committed steps of all attempts."""
        return self.status.next_step

    @property
    def epochs(self) -> str:
        """`1/2`: of the next step, or of the last one where there is no next; "" where it is not known."""
        if not (per_epoch := self.status.steps_per_epoch):
            return ""
        step = max(min(self.status.next_step, self.status.total_steps - 1), 0)
        return f"{step // per_epoch + 1}/{max(-(-self.status.total_steps // per_epoch), 1)}"

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
        """The remaining steps at the median pace of the last ones; None before there is one, or for no known total."""
        remaining = self.status.total_steps - self.status.next_step
        return median(self.step_seconds) * remaining if self.step_seconds and self.status.total_steps else None


class RunProgress:
    """Gathers the steps of one attempt into views: by `standing_steps`, as RunLog does, of the newest alone."""

    def __init__(self, title: str, attempt: int, *, started: float) -> None:
        """`started` is a monotonic time, as `now` of `view`."""
        self._title = title
        self._attempt = attempt
        self._started = started
        self._steps: Sequence[StepLine] = ()  # the newest alone: a driver lives as long as its run
        self.last_event = ""
        """The last thing that happened, as a short text."""

    def add(self, lines: Iterable[Record]) -> None:
        """Lines of metrics.jsonl, in the order in which their steps were committed."""
        new = filter(None, (StepLine.of(line, 0) for line in lines))
        self._steps = standing_steps([*self._steps, *new], ())[0][-STEPS_REMEMBERED:]

    def view(
        self, status: TrainerStatus, *, servers: Sequence[ServerInfo], evals: Sequence[EvalReport] = (), now: float
    ) -> RunView:
        """A step counts once both have told it, its line and the status: else the last reward would be another's."""
        steps = [one for one in self._steps if one.step < status.next_step]
        if steps:
            status = replace(status, next_step=min(status.next_step, steps[-1].step + 1))
        tokens = [one.tokens_per_s for one in steps if math.isfinite(one.tokens_per_s)][-MEAN_OVER_STEPS:]
        return RunView(
            title=self._title,
            attempt=self._attempt,
            status=status,
            elapsed_s=now - self._started,
            rewards=tuple(one.reward for one in steps),
            step_seconds=tuple(one.step_s for one in steps if math.isfinite(one.step_s)),
            tokens_per_s=median(tokens) if tokens else None,
            servers=tuple(servers),
            evals=tuple(evals),
            last_event=self.last_event,
        )
