"""Does another project's trainer still get on? Its steps, its checkpoints' changes and its tree's CPU time, judged by
launcher/policy/trainer_liveness.py.

A step line is its only answer. Work that shows in a tree's CPU time alone, as a long evaluation or a load of data,
gets the patience of a first step (`health.trainer_first_s`), since a busy tree is no proof of a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from actors.foreign.foreign_process import TreeWatch
from launcher.adapters.trainer_adapter import FoundCheckpoint
from launcher.base.messages import Health, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.trainer_liveness import TrainerEvidence, TrainerLook, judge_trainer, observe_trainer

BUSY = 0.05
"""Share of one CPU, since the last progress, from which on a tree works."""
CHECKPOINTS_EVERY_S = 2.0


class ProgressWatch:
    """One incarnation. `unseen`: what shows that its steps are not seen, "" where nothing does: no step since it began,
    for as long as a first step may take, or for `trainer_min_s` after it has written a checkpoint. `torn`: the same of
    a checkpoint that does not become whole, though a later one is there."""

    def __init__(
        self,
        settings: HealthConfig,
        tree: TreeWatch,
        checkpoints: Callable[[], Sequence[FoundCheckpoint]],
        clock: Callable[[], float],
        waits_for: Callable[[], str] = str,
    ) -> None:
        """`waits_for`: what it waits for that is not its own; "" where nothing is."""
        self._settings = settings
        self._tree = tree
        self._checkpoints = checkpoints
        self._clock = clock
        self._waits_for = waits_for
        self._evidence: TrainerEvidence | None = None
        self._changed = (float("-inf"), 0.0)
        self._began = clock()
        self._found: float | None = None
        self._wrote_at = float("inf")
        self._at_progress = (0, 0.0, clock(), 0.0)
        self._changes = 0
        self.unseen = self.torn = ""

    def judge_progress(self, steps: int, median_step_s: float | None) -> Verdict:
        """`steps`: seen so far, of this process of the actor."""
        now, tree = self._clock(), self._tree.look_at_tree()
        changed = self._changed_at(now)
        if (steps, changed) != (self._at_progress[0], self._at_progress[1]):
            self._changes += 1
            self._at_progress = (steps, changed, now, tree.cpu_s)
        _, _, since, cpu_s = self._at_progress
        is_busy = tree.cpu_s - cpu_s > BUSY * (now - since)
        look = TrainerLook(
            at=now,
            state=tree.state,
            # What starts the ranks, and their like, use the CPU while a stopped one keeps them all from a step.
            cpu_s=tree.cpu_s if tree.stopped_s is None else tree.stopped_s,
            pinged_at=since,
            ping_waits=True,
            progress=self._changes,
            waits_for=self._waits_for(),
            median_step_s=median_step_s,
            is_at_one_thing=is_busy,
        )
        before = self._evidence
        self._evidence = TrainerEvidence(look=look) if before is None else observe_trainer(before, look, self._settings)
        verdict = judge_trainer(self._evidence, self._settings, now)
        self.unseen = "" if steps or look.waits_for else self._what_is_unseen(now, changed)
        if verdict.health is Health.DEAD and steps == 0 and is_busy:
            return Verdict(health=Health.UNKNOWN, reason=f"{verdict.reason}; it works, and no step was ever seen")
        return verdict

    def _what_is_unseen(self, now: float, changed: float) -> str:
        self._found = changed if self._found is None else self._found
        if changed > self._found:
            self._wrote_at = min(self._wrote_at, now)
        no_step = f"no step was seen in {now - self._began:.0f} s"
        if now - self._wrote_at > self._settings.trainer_min_s:
            return f"{no_step}, and it wrote a checkpoint {now - self._wrote_at:.0f} s ago"
        return no_step if now - self._began > self._settings.trainer_first_s else ""

    def _changed_at(self, now: float) -> float:
        """When its newest checkpoint last changed: one that is being written is progress."""
        if now - self._changed[0] >= CHECKPOINTS_EVERY_S:
            found = self._checkpoints()
            self._changed = (now, max((one.changed_at for one in found), default=0.0))
            self.torn = torn_in(found, older_than=time.time() - self._settings.trainer_min_s)
        return self._changed[1]


def torn_in(found: Sequence[FoundCheckpoint], *, older_than: float) -> str:
    """Of some checkpoints, one that is still not whole, was not changed since, and is not the latest; "" where all that
    are so old are whole."""
    latest = max((one.step for one in found), default=0)
    for one in found:
        if one.is_whole is False and one.step < latest and one.changed_at < older_than:
            said = f"{one.path.name} is not whole, and would not be resumed from: {one.problem}"
            return f"{said}: check what is written last into each (for conf=command, trainer.checkpoint_file)"
    return ""
