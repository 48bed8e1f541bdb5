"""Rejected batches: an event each, what the Coordinator needs to know of them, and the batch for a person.

The batch is written by the process that holds it, beside the incidents. The Coordinator, which knows its incident,
moves it into that folder.
"""

from __future__ import annotations

import itertools
import logging
import os
import time

from launcher.base.messages import Cause, Rejection
from launcher.base.rollouts import Completion, RolloutBatch, RolloutGroup
from launcher.policy.admission import Admission
from launcher.run_files.journal import Journal, encode

FOLDER = "rejected"
SETTLED_STEPS = 3
"""After which a batch that was merely far from what is usual was an accident."""
MOST_KNOWN = 8
"""In the trainer's view; the journal has all."""
MOST_FILES = 20
"""That wait for their incident."""
MOST_BATCH_BYTES = 4 * 2**20
LONGEST_TEXT = 4000

log = logging.getLogger("trainer")


class Rejections:
    """`since_step`: those since the last committed step, and suspicions that have not settled yet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._folder = journal.path.parent / "incidents" / FOLDER
        self._count = itertools.count(1)
        self.since_step: tuple[Rejection, ...] = ()
        self._unscored: tuple[RolloutGroup, ...] = ()

    def add(self, batch: RolloutBatch, decision: Admission, global_step: int) -> None:
        """Record it. A batch that can't be kept is logged, and costs nothing else."""
        self._unscored = batch.all_groups if decision.cause is Cause.VERIFIER_BROKEN else ()
        name = f"step{global_step}-{os.getpid()}-{next(self._count)}"
        rejection = Rejection(
            id=name,
            global_step=global_step,
            reason=decision.reason,
            cause=decision.cause,
            subjects=decision.subjects,
            file=self._keep(batch, name),
        )
        self.since_step = (*self.since_step, rejection)[-MOST_KNOWN:]
        self._journal.record(
            "batch.rejected",
            subject="trainer",
            reason=decision.reason,
            global_step=global_step,
            cause=decision.cause,
            subjects=list(decision.subjects),
            rejection=name,
        )

    def committed(self, step: int) -> None:
        """A step was committed: whatever spoilt a batch is over; a change of the policy is not for some steps."""
        self._unscored = ()
        self.since_step = tuple(
            one
            for one in self.since_step
            if one.cause is Cause.REWARD_COLLAPSE and one.global_step > step - SETTLED_STEPS
        )

    def restored(self) -> None:
        """The trainer holds other weights now."""
        self.since_step = ()
        self._unscored = ()

    def to_score_again(self) -> dict[str, list[Completion]]:
        """By prompt the completions of the batch that was rejected last, where the reward function was at fault; once.
        To ask for after a pause: while it is broken the same batch would be rejected again and again. Of one that was
        merely far from what is usual the completions may be what was wrong. An episode's reward can't be had without
        playing it."""
        groups = self._unscored
        self._unscored = ()
        return {
            group.prompt.id: [one.completion for one in group.rollouts]
            for group in groups
            if not any(one.segments for one in group.rollouts)
        }

    def _keep(self, batch: RolloutBatch, name: str) -> str:
        file = self._folder / f"{name}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            waiting = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in waiting[: max(len(waiting) - MOST_FILES + 1, 0)]:
                old.unlink(missing_ok=True)
            file.write_bytes(batch_as_json(batch))
        except OSError as error:
            log.warning("batch.not_kept file=%s reason=%r", file, error)
            return ""
        return str(file)


def batch_as_json(batch: RolloutBatch) -> bytes:
    """As many of its groups as fit: half a JSON document is of no use to anybody."""
    groups: list[bytes] = []
    room = MOST_BATCH_BYTES
    for group in batch.all_groups:
        shown = {
            "prompt": group.prompt.id,
            "record": dict(group.prompt.record),
            "rollouts": [
                {
                    "text": rollout.text[:LONGEST_TEXT],
                    "reward": rollout.reward,
                    "server": rollout.completion.server,
                    "weight_version": rollout.completion.weight_version,
                    "finish_reason": rollout.completion.finish_reason,
                    "token_ids": rollout.completion.token_ids,
                    "logprobs": rollout.completion.logprobs,
                }
                for rollout in group.rollouts
            ],
        }
        line = encode(shown).rstrip()
        room -= len(line)
        if room < 0:
            break
        groups.append(line)
    head = encode(
        {
            "written_at": time.time(),
            "groups_shown": f"{len(groups)} of {len(batch.all_groups)}",
            "failed": batch.failed,
            "retried": batch.retried,
        }
    )
    return head.rstrip()[:-1] + b', "groups": [\n' + b",\n".join(groups) + b"\n]}\n"
