"""The steps that stand, followed in the run's own files as they grow.

Who reads them from disk needs nobody to tell it, and knows after a restart what its predecessor knew. A restore takes
back the steps after it as soon as the journal says so, and not only when the first of them has been repeated: else
the damage would be found again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.policy.reward_health import RewardPoint
from launcher.run_files.journal import number_of
from launcher.run_files.line_tail import LineTail
from launcher.run_files.run_paths import RunPaths

RESTORED = frozenset({"trainer.restored", "trainer.loaded"})
CANARY_EVENTS = frozenset({"canary.wrong", "canary.sound"})
REWARD = "grpo_actor/task_reward"
MOST_STEPS = 2000
"""Kept; more than any detector looks back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What is needed of one committed step. NaN where its line did not say."""

    point: RewardPoint
    truncated_share: float
    distance: float


class RewardSeries:
    """`refresh` reads what is new; the rest is what stands as of then. `restored_step`: to which the last damage was
    gone back from; None where there was none."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics = LineTail(paths.metrics)
        self._events = LineTail(paths.events)
        self.steps: list[StepSeen] = []
        self.restored_step: int | None = None
        self.accusing_canary: Mapping[str, object] | None = None
        self.refresh()

    @property
    def points(self) -> list[RewardPoint]:
        return [step.point for step in self.steps]

    @property
    def next_step(self) -> int:
        return self.steps[-1].point.step + 1 if self.steps else 0

    def refresh(self) -> bool:
        """True where something changed. Events first: a restore is written before the steps that follow it."""
        before = (len(self.steps), self.next_step, self.restored_step)
        for event in self._events.read():
            self._take_event(event)
        for line in self._metrics.read():
            self._take_step(line)
        del self.steps[:-MOST_STEPS]
        return before != (len(self.steps), self.next_step, self.restored_step)

    def restored(self, step: int) -> None:
        """Steps after `step` stand no more."""
        while self.steps and self.steps[-1].point.step > step:
            self.steps.pop()

    def _take_event(self, event: Mapping[str, object]) -> None:
        name, step = event.get("event"), event.get("global_step")
        if name in RESTORED and isinstance(step, int):
            self.restored(step)
        elif name == "repair.begun":
            self._take_repair(event.get("onset_step"), event.get("restored_step"))
        elif name in CANARY_EVENTS:
            self.accusing_canary = event if name == "canary.wrong" else None

    def _take_repair(self, onset_step: object, restored_step: object) -> None:
        """Only what went back from an onset is on probation: that a process crashed says nothing of the policy."""
        if isinstance(onset_step, int) and isinstance(restored_step, int):
            self.restored_step = restored_step

    def _take_step(self, line: Mapping[str, object]) -> None:
        step = line.get("global_step")
        if not isinstance(step, int):
            return
        while self.steps and self.steps[-1].point.step >= step:
            self.steps.pop()
        mean, low, high = (number_of(line.get(f"{REWARD}/{key}")) for key in ("avg", "min", "max"))
        self.steps.append(
            StepSeen(
                point=RewardPoint(step=step, mean=mean, low=low, high=high),
                truncated_share=number_of(line.get("grpo_actor/no_eos_ratios/avg")),
                distance=number_of(line.get("grpo_actor/logprob_distance/avg")),
            )
        )
