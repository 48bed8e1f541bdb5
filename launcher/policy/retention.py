"""Decides which checkpoints retention must keep, so that a restore finds a good one (P4). The others may be deleted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, newest_first

KEPT_GOOD = 2


def worth_keeping(checkpoints: Sequence[CheckpointFacts], keep_last: int) -> frozenset[int]:
    """What retention must leave alone: the newest, the best, the newest good ones, and the next one to become good.

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
