"""What a terminal shows of a live run: `RunView`, and `RunProgress`, which gathers it from committed steps.

Pure: the caller passes what it knows, with the time; terminal_panel.py draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from launcher.base.messages import EvalReport, ServerInfo, TrainerStatus
from launcher.run_files.journal import number_of
from launcher.run_log.step_line import REWARD, TOKENS_PER_S

STEP_SECONDS = "timeperf/step_s"

MEAN_OVER_STEPS = 10
WINDOWS_ACROSS = 50
"""A curve's mean is over 10 steps, but never over less than this part of a long run: noise would hide it."""
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
    """Gathers the steps of one attempt into views. An earlier step undoes later ones (restore)."""

    def __init__(self, title: str, attempt: int, *, started: float) -> None:
        """`started` is a monotonic time, as `now` of `view`."""
        self._title = title
        self._attempt = attempt
        self._started = started
        self._lines: list[Mapping[str, object]] = []
        self.last_event = ""
        """The last thing that happened, as a short text."""

    def add(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Lines of metrics.jsonl, in the order in which their steps were committed."""
        for line in lines:
            step = number_of(line.get("global_step"))
            kept = [earlier for earlier in self._lines if number_of(earlier.get("global_step")) < step]
            self._lines = [*kept, line][-STEPS_REMEMBERED:]

    def view(
        self, status: TrainerStatus, *, servers: Sequence[ServerInfo], evals: Sequence[EvalReport] = (), now: float
    ) -> RunView:
        """A step counts once both have told it, its line and the status: else the last reward would be another's."""
        lines = [line for line in self._lines if number_of(line.get("global_step")) < status.next_step]
        if lines:
            told = int(number_of(lines[-1].get("global_step"))) + 1
            status = replace(status, next_step=min(status.next_step, told))
        tokens = _figures(lines, TOKENS_PER_S)[-MEAN_OVER_STEPS:]
        return RunView(
            title=self._title,
            attempt=self._attempt,
            status=status,
            elapsed_s=now - self._started,
            rewards=tuple(number_of(line.get(REWARD)) for line in lines),
            step_seconds=tuple(_figures(lines, STEP_SECONDS)),
            tokens_per_s=median(tokens) if tokens else None,
            servers=tuple(servers),
            evals=tuple(evals),
            last_event=self.last_event,
        )


def _figures(lines: Iterable[Mapping[str, object]], key: str) -> list[float]:
    figures = (number_of(line.get(key)) for line in lines)
    return [figure for figure in figures if math.isfinite(figure)]


def mean_window(steps: int) -> int:
    """Over how many steps the mean of a reward curve of `steps` is taken."""
    return max(MEAN_OVER_STEPS, steps // WINDOWS_ACROSS)
