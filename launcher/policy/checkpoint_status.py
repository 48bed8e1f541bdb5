"""What an operator is told of a checkpoint: good, candidate, condemned or unverified; and why.

The same certificate that the run itself goes by (launcher/policy/restore.py), from what the disk alone tells, so that
it can be had for a live run and for a dead one. `unverified` is what nobody vouches for: a folder without a manifest
whose content nobody has looked at, and one that is not complete.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from launcher.config.supervision import RestoreConfig
from launcher.policy.restore import CheckpointFacts, CheckpointHealth, certify


class CheckpointStatus(enum.StrEnum):
    GOOD = "good"
    CANDIDATE = "candidate"
    CONDEMNED = "condemned"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What went wrong with the learning, as far as it still stands.

    `onset_step`: the first step that shows it. `first_step`: the first whose checkpoint holds it. `source`: who says
    so: the run's own incident, or the rewards as they are read now.
    """

    onset_step: int
    first_step: int
    reason: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCheckpoint:
    standing: CheckpointStatus
    reason: str


def judge(
    global_step: int,
    *,
    is_vouched: bool,
    problem: str,
    set_aside_as: str,
    damage: Damage | None,
    last_step: int,
    settings: RestoreConfig,
) -> JudgedCheckpoint:
    """`is_vouched`: a manifest, or a look at all of it, says what it holds. `problem`: why it is not whole, or "".
    `set_aside_as`: why the run took it out of its list, or "". `last_step`: the last step that stands.
    """
    if set_aside_as == "condemned":
        return JudgedCheckpoint(standing=CheckpointStatus.CONDEMNED, reason="the run set it aside: it holds damage")
    if damage is not None and global_step >= damage.first_step:
        return JudgedCheckpoint(
            standing=CheckpointStatus.CONDEMNED, reason=f"checkpoints from step {damage.first_step} on hold the damage"
        )
    if problem:
        return JudgedCheckpoint(standing=CheckpointStatus.UNVERIFIED, reason="it is not complete")
    if not is_vouched:
        return JudgedCheckpoint(
            standing=CheckpointStatus.UNVERIFIED, reason="nothing vouches for its content; --verify looks"
        )
    if set_aside_as:
        return JudgedCheckpoint(
            standing=CheckpointStatus.UNVERIFIED, reason=f"set aside ({set_aside_as}): what followed it was taken back"
        )
    return _certify(global_step, damage, last_step, settings)


def _certify(global_step: int, damage: Damage | None, last_step: int, settings: RestoreConfig) -> JudgedCheckpoint:
    healthy_until = last_step if damage is None else min(last_step, damage.first_step - 1)
    facts = CheckpointFacts(global_step=global_step, policy_version=global_step + 1, health=CheckpointHealth.CANDIDATE)
    after = max(0, healthy_until - global_step)
    if certify(facts, healthy_until, settings) is CheckpointHealth.GOOD:
        return JudgedCheckpoint(standing=CheckpointStatus.GOOD, reason=f"{after} healthy steps after it")
    reason = f"{after} healthy steps after it, {settings.good_after_steps} are asked"
    return JudgedCheckpoint(standing=CheckpointStatus.CANDIDATE, reason=reason)
