"""When to save, and what a checkpoint of a run holds: model, optimizer, data position, counters."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.policy_model import PolicyModel
from actors.prompt_queue import PromptQueue
from actors.retention import worth_sparing
from launcher.checkpoints import Checkpoint, CheckpointName, CheckpointStore
from launcher.config import RunConfig
from launcher.errors import CheckpointError
from launcher.fingerprint import config_fingerprint
from launcher.journal import Journal
from launcher.messages import EvalReport
from launcher.run_paths import RunPaths
from launcher.schedule import Schedule

POSITION_FILE = "position.json"
REWARDS_KEPT = 20
"""Rewards of the last steps that a checkpoint's manifest averages as its health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the run stands: `next_step` counts from 0, `epoch_step` is its number within `epoch`."""

    next_step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    last_epoch: int = 0
    last_epoch_step: int = 0
    recent_rewards: tuple[float, ...] = ()
    evals: tuple[EvalReport, ...] = ()

    @property
    def checkpoint_name(self) -> CheckpointName | None:
        """Of the checkpoint that holds the last step; None before the first."""
        if self.next_step == 0:
            return None
        return CheckpointName(epoch=self.last_epoch, epoch_step=self.last_epoch_step, global_step=self.next_step - 1)

    def after_step(self, *, reward: float, epoch: int) -> Position:
        """The step was committed; `epoch` is the queue's, one further where that step ended an epoch."""
        return dataclasses.replace(
            self,
            next_step=self.next_step + 1,
            epoch=epoch,
            epoch_step=self.epoch_step + 1 if epoch == self.epoch else 0,
            last_epoch=self.epoch,
            last_epoch_step=self.epoch_step,
            recent_rewards=(*self.recent_rewards, reward)[-REWARDS_KEPT:],
        )

    def with_evals(self, evals: Sequence[EvalReport]) -> Position:
        return dataclasses.replace(self, evals=tuple(evals))

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        fields = dict(data)
        evals = tuple(EvalReport(**report) for report in fields.pop("evals"))
        rewards = tuple(fields.pop("recent_rewards"))
        return cls(evals=evals, recent_rewards=rewards, **fields)


class Checkpointer:
    """Saves when `saver` or `recover` is due; the saver's checkpoints stay, of the others the newest few."""

    def __init__(self, config: RunConfig, paths: RunPaths, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self._store = CheckpointStore(paths.default_checkpoints)
        self._fingerprint = config_fingerprint(config)
        now = time.monotonic()
        self._saver = Schedule(config.saver, now=now)
        self._recover = Schedule(config.recover, now=now)
        self._evaluator = Schedule(config.evaluator, now=now)
        self._keep_next = False

    def is_due(self, *, ended_epoch: bool) -> bool:
        """After each committed step, once: is a checkpoint due?"""
        now = time.monotonic()
        self._keep_next |= self._saver.step_done(ended_epoch=ended_epoch, now=now)
        return self._recover.step_done(ended_epoch=ended_epoch, now=now) or self._keep_next

    def evaluation_is_due(self, *, ended_epoch: bool) -> bool:
        return self._evaluator.step_done(ended_epoch=ended_epoch, now=time.monotonic())

    def save(self, model: PolicyModel, queue: PromptQueue, position: Position) -> Checkpoint | None:
        """Commit the state after the last step, then prune; None where that step is saved already, or there is none.

        Raises CheckpointError, with the older checkpoints as they were.
        """
        name = position.checkpoint_name
        if name is None or self._store.find(name.global_step) is not None:
            return None
        started = time.monotonic()
        with self._store.staging(name) as staged:
            model.save(staged)
            state = {"position": position.to_json(), "queue": queue.state_dict()}
            (staged / POSITION_FILE).write_text(json.dumps(state))
            committed = self._store.commit(
                staged,
                global_step=name.global_step,
                policy_version=model.policy_version,
                config_fingerprint=self._fingerprint,
                health={"reward_mean": fmean(position.recent_rewards), "verdict": "HEALTHY"},
                keep=self._keep_next,
            )
        self._keep_next = False
        self._journal.record(
            "checkpoint.committed",
            subject=str(name),
            global_step=name.global_step,
            seconds=time.monotonic() - started,
        )
        spare = worth_sparing(self._store, self._config, healthy_until=position.next_step - 1)
        for removed in self._store.prune(self._config.recover.keep_last, spare=spare):
            self._journal.record("checkpoint.pruned", subject=str(removed), global_step=removed.global_step)
        return committed

    def load(self, folder: Path, model: PolicyModel, queue: PromptQueue) -> Position:
        """Put model, optimizer, RNG, data position and counters back to what `folder` holds.

        Checkpoints of later steps are set aside: those steps are trained again. Raises CheckpointError.
        """
        model.load(folder)
        path = folder / POSITION_FILE
        try:
            state = json.loads(path.read_text())
            position = Position.from_json(state["position"])
            queue.load_state_dict(state["queue"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} can't be read: {error!r}", "resume from an older checkpoint") from error
        self._go_on_from(position, folder.name)
        return position

    def load_step(self, global_step: int, model: PolicyModel, queue: PromptQueue) -> Position:
        """`load` of the committed checkpoint of a step, proven whole before anything is changed by it."""
        checkpoint = self._store.find(global_step)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint of step {global_step} in {self._store.root}")
        self._store.verify(checkpoint)
        return self.load(checkpoint.path, model, queue)

    def begin_anew(self, model: PolicyModel, queue: PromptQueue, first: Mapping[str, Any]) -> Position:
        """Back to the weights that the run began with, and to the data position `first`; every checkpoint is aside."""
        model.begin_anew()
        queue.load_state_dict(first)
        self._go_on_from(Position(), "the beginning")
        return Position()

    def _go_on_from(self, position: Position, what: str) -> None:
        for aside in self._store.set_aside_after(position.next_step - 1):
            self._journal.record("checkpoint.set_aside", subject=aside.name, reason=f"resumed from {what}")
        now = time.monotonic()
        for schedule in (self._saver, self._recover, self._evaluator):
            schedule.restored(now=now, steps_done=position.next_step, epochs_done=position.epoch)
