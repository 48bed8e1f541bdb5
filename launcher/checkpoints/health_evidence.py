"""What files show of a run's health, step by step, and from it the newest step whose checkpoint is good.

Of each step: seen healthy, seen bad, in doubt, unreadable, or not seen; with the file that shows it. Every tool that
calls a checkpoint good, or advises one, asks `good_until`, so that all give the same answer (P11). A step that no file
shows vouches for nothing:

- The onset's interval begins after the last step that was seen healthy, however many steps lie between.
- A drop that was seen step by step is dated exactly: one healthy step after a checkpoint is enough, three where the
  chart is sampled. Otherwise `good_after_steps` are needed, and they count only where no stretch of steps is missing
  since the run's beginning: what is hidden may be the fall, and a lower level after it looks like any other.
- In a run that was not seen whole, or that fell, nothing counts after the level has left the best that was seen,
  though it be too little for a fall.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from launcher.checkpoints.onset import Fall, leaves_level_at
from launcher.checkpoints.segments import Floats
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import Damage, JudgedCheckpoint, checkpoint_status

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BEGINS_BY, HOLE_STEPS, HOLE_SPACINGS = 20, 20, 5
"""A later first step is a late beginning. A hole is longer than both: so many steps, so many usual spacings."""
EDGE_STEPS, BEFORE_EDGE = 3, 5
"""A fall within so many rows is an edge; it is exactly dated where this many steps before it were seen one by one."""
NEEDED_BEFORE_AN_EDGE, NEEDED_BEFORE_A_GAP = 1, 3
ZEROS_LOOKED_FOR = 10
LEAST_BEFORE = 8
COMPLETE_SHARE = 0.95


class Seen(enum.StrEnum):
    """What the files show of a step."""

    HEALTHY = "seen healthy"
    BAD = "seen bad"
    IN_DOUBT = "in doubt"
    UNREADABLE = "unreadable"
    NOT_SEEN = "not seen"


@dataclass(frozen=True, kw_only=True)
class SeenSteps:
    """The steps that count, in order and each once, with their mean rewards (NaN: none that can be read).

    `origins`: of each the index in `files`. `total`: how many steps the run is to have, 0 where that is not known.
    `unread`: files that could not be read, each with why. `passed_over`: what else was not read, which vouches for
    nothing and hides no stretch of steps.
    """

    steps: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rewards: Floats = field(default_factory=lambda: np.zeros(0))
    origins: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    files: tuple[str, ...] = ()
    total: int = 0
    unread: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    @functools.cached_property
    def hole(self) -> tuple[int, int] | None:
        """The first stretch of steps that no file shows, from the run's beginning on; None where there is none."""
        if not len(self.steps):
            return None
        if self.steps[0] > BEGINS_BY:
            return 0, int(self.steps[0]) - 1
        gaps = np.diff(self.steps)
        longest = max(HOLE_STEPS, HOLE_SPACINGS * float(np.median(gaps))) if len(gaps) else math.inf
        at = np.flatnonzero(gaps > longest)
        return (int(self.steps[at[0]]) + 1, int(self.steps[at[0] + 1]) - 1) if len(at) else None

    @property
    def is_complete(self) -> bool:
        """Was nearly every step of the run seen, up to its last?"""
        last = max(self.total - 1, int(self.steps[-1])) if len(self.steps) else 0
        return len(self.steps) >= COMPLETE_SHARE * (last + 1)


@dataclass(frozen=True, kw_only=True)
class HealthEvidence:
    """`damage`: what went wrong and was not repaired. `healthy`: of each step that was seen whether it counts."""

    seen: SeenSteps = field(default_factory=SeenSteps)
    damage: Damage | None = None
    healthy: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    settings: RestoreConfig = field(default_factory=RestoreConfig)

    @property
    def last_step(self) -> int:
        """The last that was seen, -1 where none was."""
        return int(self.seen.steps[-1]) if len(self.seen) else -1

    @functools.cached_property
    def _healthy_steps(self) -> Ints:
        """Those that vouch for a checkpoint: before the damage."""
        steps: Ints = self.seen.steps[self.healthy]
        if self.damage is not None:
            before = self.damage.trusted_before
            steps = steps[steps < (self.damage.first_step if before is None else before)]
        return steps

    @property
    def last_good_step(self) -> int | None:
        """The last step that was seen healthy before the damage."""
        return int(self._healthy_steps[-1]) if len(self._healthy_steps) else None

    @property
    def needed(self) -> int:
        """Healthy steps after a checkpoint that make it good."""
        if self.damage is None and not self.seen.is_complete:
            return 2 * self.settings.good_after_steps  # a slope that has only begun looks like noise
        dated = None if self.damage is None else self.damage.needed
        return self.settings.good_after_steps if dated is None else dated

    def healthy_after(self, step: int) -> int:
        """How many steps after it were seen healthy; none where no file shows a step up to it."""
        first = int(self.seen.steps[0]) if len(self.seen) else 0
        if first > BEGINS_BY and step < first:
            return 0
        return int((self._healthy_steps > step).sum())

    @property
    def good_until(self) -> int | None:
        """A checkpoint is good if it is of this step or an earlier one; None where none can be."""
        return self._until(self.needed)

    @property
    def unsure_until(self) -> int | None:
        """Where no checkpoint is good: one of this step or earlier lies well before the damage, as far as was seen."""
        last = None if self.damage is None else self.last_good_step
        until = -1 if last is None else last - max(1, self.settings.onset_margin_steps)
        return until if until >= 0 and self.healthy_after(until) else None

    def _until(self, needed: int) -> int | None:
        until = int(self._healthy_steps[-needed]) - 1 if len(self._healthy_steps) >= needed else -1
        return until if until >= 0 and self.healthy_after(until) >= needed else None

    def of(self, step: int) -> tuple[Seen, str]:
        """What was seen of a step, and the file that shows it, "" where none does."""
        row = int(np.searchsorted(self.seen.steps, step))
        if row == len(self.seen) or self.seen.steps[row] != step:
            return Seen.NOT_SEEN, ""
        file = self.seen.files[int(self.seen.origins[row])] if self.seen.files else ""
        if not math.isfinite(self.seen.rewards[row]):
            return Seen.UNREADABLE, file
        if self.healthy[row]:
            return Seen.HEALTHY, file
        is_bad = self.damage is not None and step >= self.damage.onset_step
        return Seen.BAD if is_bad else Seen.IN_DOUBT, file

    def status_of(
        self, step: int, *, is_vouched: bool = True, problem: str = "", set_aside_as: str = ""
    ) -> JudgedCheckpoint:
        """Of a checkpoint of this step."""
        return checkpoint_status(
            step,
            healthy_until=self.last_step,
            settings=replace(self.settings, good_after_steps=self.needed),
            healthy_after=self.healthy_after(step),
            damage=self.damage,
            is_vouched=is_vouched,
            problem=problem,
            set_aside_as=set_aside_as,
        )

    def reward_around(self, step: int) -> float | None:
        """The mean of the five steps on each side of one; None where there is none."""
        near = self.seen.rewards[np.abs(self.seen.steps - step) <= 5]
        near = near[np.isfinite(near)]
        return float(near.mean()) if len(near) else None

    @property
    def not_known(self) -> str:
        """What keeps the health of the newest steps from being known; "" where nothing does."""
        if self.seen.unread:
            return f"not all could be read: {'; '.join(self.seen.unread)}"
        if not np.isfinite(self.seen.rewards).any():
            return "no file shows how any step went"
        if self.seen.hole is not None:
            return "no file shows steps {} to {}".format(*self.seen.hole)
        return ""


def judge(seen: SeenSteps, fall: Fall | None, settings: RestoreConfig, *, source: str) -> HealthEvidence:
    """The evidence of steps of which one fall, by its rows, is to be gone back to before; None: there is none."""
    known = np.isfinite(seen.rewards)
    if fall is None:
        end = _before_zeros(seen.rewards, len(seen))
        if not seen.is_complete or seen.hole is not None:  # else what is no fall is noise
            end = _end_of_trust(seen, end)
        return HealthEvidence(seen=seen, healthy=known & (np.arange(len(seen)) < end), settings=settings)
    early = _before_zeros(seen.rewards, fall.earliest)
    needed = _needed(seen, fall, early)
    end = early if needed is not None else _end_of_trust(seen, early)
    rows = np.arange(len(seen))
    onset, trusted_before = int(seen.steps[fall.onset]), int(seen.steps[early - 1]) + 1 if early else 0
    damage = Damage(
        onset_step=onset,
        first_step=onset - 1,
        reason=f"mean reward {fall.before:.3g} → {fall.after:.3g}, {fall.shape}",
        source=source,
        trusted_before=trusted_before,
        needed=needed,
    )
    is_back = rows >= (len(seen) if fall.end is None else fall.end)
    return HealthEvidence(seen=seen, damage=damage, healthy=known & ((rows < end) | is_back), settings=settings)


def _before_zeros(rewards: Floats, early: int) -> int:
    """Before rewards of 0 next to the fall, or at the end, where the run began without any: spikes date a fall too
    late, and of a single one nothing is known yet."""
    if (rewards[:ZEROS_LOOKED_FOR] == 0).any():
        return early
    while len(zeros := np.flatnonzero(rewards[max(0, early - ZEROS_LOOKED_FOR) : early] == 0)):
        early = max(0, early - ZEROS_LOOKED_FOR) + int(zeros[0])
    return early


def _needed(seen: SeenSteps, fall: Fall, early: int) -> int | None:
    """Where it fell most of the way from one step that was seen to the next: how many healthy ones date it."""
    if early < LEAST_BEFORE or fall.bottom - early >= EDGE_STEPS:
        return None
    if seen.rewards[early] > (fall.before + fall.after) / 2:
        return None
    around = seen.steps[early - 1 - BEFORE_EDGE : early + 1]
    return NEEDED_BEFORE_AN_EDGE if around[-1] - around[0] == len(around) - 1 else NEEDED_BEFORE_A_GAP


def _end_of_trust(seen: SeenSteps, end: int) -> int:
    """The row from which on nothing vouches for the weights, `end` at the latest."""
    if seen.hole is not None:
        end = min(end, int(np.searchsorted(seen.steps, seen.hole[0])))
    rows = np.flatnonzero(np.isfinite(seen.rewards[:end]))
    left = leaves_level_at(seen.rewards[rows])
    return end if left == len(rows) else int(rows[left])
