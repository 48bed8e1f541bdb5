"""The status of a checkpoint (good, candidate, condemned or unverified), which ones may be gone back to, and which
retention must keep for that.

One rule for the run itself, for retention and for every tool of the operator. A checkpoint of step g holds the weights
after step g:

    candidate ──(good_after_steps healthy steps after it)──► good        either ──(at or after the damage)──► condemned

`unverified` is a folder without a manifest whose content nobody has read, one that is not complete, and one that was
set aside.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from launcher.config.supervision import RestoreConfig

KEPT_GOOD = 2
"""A collapse that comes back goes further back than the newest good one."""


class CheckpointStatus(enum.StrEnum):
    GOOD = "good"
    CANDIDATE = "candidate"
    CONDEMNED = "condemned"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What the choice of a restore needs of one checkpoint. `is_complete`: its manifest is valid, and nothing found it
    damaged.

    `in_memory`: the state that the trainer kept after the step, which is a checkpoint like any other except that it
    does not outlive the machine. `reward`: the mean of the last steps before it, where its manifest says so.
    """

    global_step: int
    status: CheckpointStatus
    is_complete: bool = True
    in_memory: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What went wrong with the learning and was not repaired.

    `onset_step`: the first step that shows it. `first_step`: the first whose checkpoint holds it. `source`: what says
    so: the run's own incident, or the rewards as they are read now. `trusted_before`: steps from this one on vouch for
    nothing; `first_step` where it is None. `needed`: healthy steps after a checkpoint that make it good, where the
    onset is dated better than most.
    """

    onset_step: int
    first_step: int
    reason: str
    source: str
    trusted_before: int | None = None
    needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCheckpoint:
    status: CheckpointStatus
    reason: str


def checkpoint_status(
    global_step: int,
    *,
    healthy_until: int,
    settings: RestoreConfig,
    damage: Damage | None = None,
    healthy_after: int | None = None,
    is_vouched: bool = True,
    problem: str = "",
    set_aside_as: str = "",
) -> JudgedCheckpoint:
    """`healthy_until`: the last step that was judged healthy, by whoever saw all of them. `healthy_after`: of whoever
    read files instead, how many steps after it were seen healthy. `is_vouched`: a manifest, or a full
    verification, says what it holds. `problem`: why it is not complete. `set_aside_as`: why the run took it out of its
    list."""
    condemned, unverified = CheckpointStatus.CONDEMNED, CheckpointStatus.UNVERIFIED
    if set_aside_as == "condemned":
        return JudgedCheckpoint(status=condemned, reason="the run set it aside: it holds damage")
    if damage is not None and global_step >= damage.first_step:
        return JudgedCheckpoint(
            status=condemned, reason=f"checkpoints from step {damage.first_step} on hold the damage"
        )
    if problem:
        return JudgedCheckpoint(status=unverified, reason="it is not complete")
    if not is_vouched:
        return JudgedCheckpoint(status=unverified, reason="nothing vouches for its content; --verify reads it")
    if set_aside_as:
        reason = f"set aside ({set_aside_as}): what followed it was undone"
        return JudgedCheckpoint(status=unverified, reason=reason)
    if damage is not None:
        healthy_until = min(healthy_until, damage.first_step - 1)
    after = max(0, healthy_until - global_step) if healthy_after is None else healthy_after
    if after >= settings.good_after_steps:
        return JudgedCheckpoint(status=CheckpointStatus.GOOD, reason=f"{after} healthy steps after it")
    reason = f"{after} healthy steps after it, {settings.good_after_steps} are needed"
    return JudgedCheckpoint(status=CheckpointStatus.CANDIDATE, reason=reason)


class HasStatus(Protocol):
    @property
    def global_step(self) -> int: ...

    @property
    def status(self) -> CheckpointStatus: ...


Judged = TypeVar("Judged", bound=HasStatus)


def newest_first(
    checkpoints: Iterable[Judged], *, before_step: int | None = None, good: bool = False, condemned: bool = False
) -> list[Judged]:
    """Those that may be gone back to, the newest first. `good`: only these. `condemned`: these too."""
    found = [
        one
        for one in checkpoints
        if (before_step is None or one.global_step < before_step)
        and (condemned or one.status is not CheckpointStatus.CONDEMNED)
        and (not good or one.status is CheckpointStatus.GOOD)
    ]
    return sorted(found, key=lambda one: one.global_step, reverse=True)


def worth_keeping(checkpoints: Sequence[CheckpointFacts], keep_last: int) -> frozenset[int]:
    """What retention must leave alone, so that a restore finds a good one (P4): the newest, the best, the newest good
    ones, and the next one to become good.

    Young checkpoints are not certified yet: by age alone, retention would delete the last that is. Of the good ones
    more than one stays, since a collapse that comes back goes further back. And one young one stays until it is
    certified: where checkpoints are frequent and few are kept, none would ever become good. The best is the one with
    the highest mean reward, certified or not: it would be gone before it is.
    """
    on_disk = newest_first(c for c in checkpoints if c.is_complete and not c.in_memory)
    good = [c.global_step for c in on_disk if c.status is CheckpointStatus.GOOD]
    newest = [c.global_step for c in on_disk[:keep_last]]
    young = [c.global_step for c in on_disk if c.global_step > max(good, default=-1)]
    rewards = [(c.reward, c.global_step) for c in on_disk if c.reward is not None and math.isfinite(c.reward)]
    best = [step for _, step in sorted(rewards)][-1:]  # of equal ones the newest; none where no manifest has a reward
    return frozenset([*newest, *good[:KEPT_GOOD], *young[-1:], *best])
