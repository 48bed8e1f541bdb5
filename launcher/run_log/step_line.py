"""The steps of metrics.jsonl, and which of them are current."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from launcher.run_files.journal import Record
from launcher.run_log.line_values import as_attempt, as_float, as_integer, as_unix_time

REWARD = "rollout/reward"
TASK_REWARD = "grpo_actor/task_reward"
TOKENS_PER_S = "rollout/tokens_per_s"
DISTANCE = "grpo_actor/logprob_distance/avg"
TIMES = "timeperf/"
SECONDS = re.compile(f"{TIMES}(.+)_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of metrics.jsonl. Figures are NaN where it has none; `time` is unix seconds, 0 where it is unknown."""

    step: int
    attempt: int
    time: float
    reward: float
    task_reward: float = math.nan  # the mean; of these alone the lowest and the highest are known
    task_reward_min: float = math.nan
    task_reward_max: float = math.nan
    tokens: float
    tokens_per_s: float
    seconds: Mapping[str, float]  # the metrics `timeperf/{name}_s` by their names
    distance: float
    number: int  # of lines before it
    lineage: int | None = None  # restores of its attempt before it; None where it does not say
    epoch: int | None = None

    @classmethod
    def of(cls, line: Record, number: int) -> Self | None:
        """None where the line is of no step: an event may name one."""
        step = as_integer(line.get("global_step"))
        if step is None or "event" in line:
            return None
        return cls(
            step=step,
            attempt=as_attempt(line.get("attempt")) or 0,
            time=as_unix_time(line.get("time")),
            reward=as_float(line.get(REWARD)),
            task_reward=as_float(line.get(f"{TASK_REWARD}/avg")),
            task_reward_min=as_float(line.get(f"{TASK_REWARD}/min")),
            task_reward_max=as_float(line.get(f"{TASK_REWARD}/max")),
            tokens=as_float(line.get("rollout/tokens")),
            tokens_per_s=as_float(line.get(TOKENS_PER_S)),
            seconds={
                match[1]: as_float(line[key])
                for key in line
                if key.startswith(TIMES) and (match := SECONDS.fullmatch(key))
            },
            distance=as_float(line.get(DISTANCE)),
            number=number,
            lineage=as_integer(line.get("lineage")),
            epoch=as_integer(line.get("epoch")),
        )

    @property
    def step_s(self) -> float:
        return self.seconds.get("step", math.nan)

    @property
    def head(self) -> Record:
        """The fields that say where it belongs among the events (launcher/run_files/run_order.py)."""
        return {"global_step": self.step, "attempt": self.attempt, "lineage": self.lineage, "time": self.time}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBack:
    """The trainer went back to `step` when `after` lines of steps were written."""

    after: int
    step: int


def standing_steps(
    lines: Sequence[StepLine], backs: Sequence[SteppedBack]
) -> tuple[tuple[StepLine, ...], tuple[tuple[StepLine, ...], ...]]:
    """The current steps, in order, and those undone: one tuple for each time that steps were.

    A restore undoes the steps after its own, also where the run has not stepped since.
    """
    standing: list[StepLine] = []
    taken_back: list[tuple[StepLine, ...]] = []

    def back_to(step: int) -> None:
        gone = []
        while standing and standing[-1].step > step:
            gone.append(standing.pop())
        if gone:
            taken_back.append(tuple(reversed(gone)))

    waiting = deque(backs)
    for number, line in enumerate(lines):
        while waiting and waiting[0].after <= number:
            back_to(waiting.popleft().step)
        back_to(line.step - 1)
        standing.append(line)
    for one in waiting:
        back_to(one.step)
    return tuple(standing), tuple(taken_back)
