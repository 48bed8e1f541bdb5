"""The GRPO step loop: collect → admit → learn → publish → keep the state, in memory and when due on the disk.

    take prompts ─► rollouts at version v ─► valid? ─► gradients finite? ─► gate? ─► optimizer step = v + 1
         ▲                                     │ no          │ no             │ no            │
         └────────── prompts requeued ◄────────┴─────────────┴────────────────┘   publish ─► state in memory ─► ledger
                                                                                  ─► state on the disk when due

What comes after `publish` is written beside the next rollouts (actors/training/checkpointing.py). A step is done when
its state is in memory (actors/training/step_memory.py): a trainer killed before that has not taken it. The gate (the
HealthMonitor) is asked last, since the distance between the server's and the trainer's log-probs is known only after
the forward pass. No Ray, no HTTP: what it drives is passed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.model.update_stats import UpdateStats, batch_metrics
from actors.rollout.rollout_engine import Stopped
from actors.training.checkpointing import Checkpointer
from actors.training.rejections import Rejections
from actors.training.run_position import RunPosition
from launcher.base.disk_faults import Refusal
from launcher.base.errors import RewardError, TrainerError
from launcher.base.messages import Cause, EvalReport, StepReport
from launcher.base.rollouts import RolloutBatch, RolloutGroup
from launcher.config.schedule import steps_in_all
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission
from launcher.run_files.journal import Journal

NONFINITE_IN_A_ROW = 2
"""One such batch is dropped. At a second one in a row weights are suspected, or else the rewards that made it so."""


class RolloutSource(Protocol):
    """Where batches come from. Raises Stopped when asked to stop while it waits."""

    def collect(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch: ...

    def evaluate(self, weight_version: int) -> EvalReport | None: ...


class Gate(Protocol):
    """May a batch be trained on? `check` before the gradients, `admit` before the weights move (an AdmissionGate).

    `admit` is of the batch that was checked last. It raises Stopped when asked to stop while it waits for the answer.
    `rejected` is told of each batch that is not trained on, whoever decided it.
    """

    def check(self, batch: RolloutBatch, *, policy_version: int, global_step: int) -> Admission: ...

    def admit(self, batch: RolloutBatch, stats: UpdateStats) -> Admission: ...

    def rejected(self) -> None: ...


class GradientModel(Protocol):
    """A `PolicyModel`."""

    def compute_gradients(self, groups: Sequence[RolloutGroup]) -> UpdateStats: ...


@dataclass
class Phase:
    """What the loop is doing; read from other threads."""

    name: str = "start"
    since: float = field(default_factory=time.monotonic)
    entered: int = 0

    def enter(self, name: str) -> None:
        self.name = name
        self.since = time.monotonic()
        self.entered += 1


class GrpoLoop:
    """Runs steps until the last, or until stopped. One instance for one incarnation of the trainer."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model: PolicyModel,
        queue: PromptQueue,
        rollouts: RolloutSource,
        publish: Callable[[int], None],
        checkpointer: Checkpointer,
        record: Callable[[StepReport, RolloutBatch], Refusal | None],
        journal: Journal,
        attempt: int,
        gate: Gate,
        weights_lock: threading.RLock | None = None,
    ) -> None:
        """`record` returns what refused the step's lines, which it keeps. `weights_lock` is held while the weights
        change: whoever reads them on another thread takes it, for as long as an export lasts. `view_lock` is held while
        version and phase change: to read them, which takes no time.
        """
        self._config = config
        self._model = model
        self._queue = queue
        self._rollouts = rollouts
        self._publish = publish
        self._checkpointer = checkpointer
        self._record = record
        self._journal = journal
        self._attempt = attempt
        self._gate = gate
        self._position = RunPosition()
        self._stopping = False
        self._saves = True
        self._nonfinite_in_a_row = 0
        self._is_half_taken = False
        self._lineage: int | None = None
        self.refusal: Refusal | None = None
        self.rejections = Rejections(journal)
        self.evals: list[EvalReport] = []
        self.phase = Phase()
        self.weights_lock = weights_lock or threading.RLock()
        self.view_lock = threading.Lock()

    @property
    def next_step(self) -> int:
        return self._position.next_step

    @property
    def total_steps(self) -> int:
        """At most: with actor.dynamic_sampling a step may use up more prompts than a batch has."""
        if self._queue.epoch >= self._config.total_train_epochs:
            return self.next_step
        return steps_in_all(self._config, self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return self._queue.steps_per_epoch(self._config.train_dataset.batch_size)

    @property
    def usual_distance(self) -> float | None:
        """As of RunPosition."""
        return self._position.usual_distance

    @property
    def policy_version(self) -> int:
        return self._model.policy_version

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The weights change inside the block: nobody reads them, and nobody reads the loop's state."""
        with self.weights_lock, self.view_lock:
            yield

    def restore(self, position: RunPosition, lineage: int | None = None) -> None:
        """Continue after `position`; the caller has restored the model and the queue. `lineage`: how many restores the
        run has behind it."""
        self._position = position
        self._lineage = lineage
        self._nonfinite_in_a_row = 0
        self._is_half_taken = False
        self.rejections.restored()
        self.evals = list(position.evals)

    def request_stop(self, *, save: bool = True) -> None:
        """Finish the step under way, save if asked to, and return from `run`."""
        self._saves = save
        self._stopping = True

    def allow(self) -> None:
        """Cancel a stop, and forget what a disk refused: the next `run` steps."""
        self._stopping = False
        self._saves = True
        self.refusal = None

    def run(self) -> bool:
        """Step until the end (True), or until a stop was requested or a disk refused a write (False): `refusal`.

        Raises RunError where the run can't continue; the committed state is saved first where it is sound.
        """
        self._queue.load_state_dict(self._queue.state_dict())  # what was in flight at a stop is taken again
        unscored = self.rejections.to_score_again()
        if not self._nonfinite_in_a_row:  # else these completions may be what a sound function scores so
            self._queue.bring_forward(unscored)
        try:
            finished = self._steps()
        except TrainerError:
            self._conclude(required=False)
            raise  # the weights may be at fault: the existing checkpoint is the better one
        except Exception:
            self._save_what_is_sound()
            raise
        if finished or (self._saves and self.refusal is None):
            self._save()
        self._conclude(required=finished)
        self.phase.enter("idle")
        return finished and self.refusal is None

    def _steps(self) -> bool:
        try:
            self._do_what_is_due()  # what a disk has refused, or a kill came before
            if self.next_step == 0 and not self.evals:
                self._evaluate()
            while self.next_step < self.total_steps:
                if not self._checkpointer.is_saving:
                    self._conclude(required=False)
                if self._stopping or self.refusal is not None:
                    return False
                self._step()
            if self.refusal is not None:
                return False
            if not self.evals or self.evals[-1].policy_version != self.policy_version:
                self._evaluate()
        except Stopped:
            return False
        return True

    def _step(self) -> None:
        started = time.monotonic()
        self.phase.enter("rollout")
        batch = self._rollouts.collect(
            self._queue, want=self._config.train_dataset.batch_size, weight_version=self.policy_version
        )
        if not self._passes_check(batch):
            return
        self.phase.enter("train")
        training = time.monotonic()
        stats = gradients_of(self._model, batch)
        if not self._is_finite(stats, batch) or not self._gate_opens(batch, stats):
            return
        waited = self._wait_to_step()
        with self.weights_lock, self._taking_step():
            stats = self._model.step_ahead()
            if not self._is_finite(stats, batch):  # the weights are as they were
                return
            with self.changing():  # version and phase together, or a look between them would see a stale server
                self._model.commit()
                # before a server, a checkpoint or the ledger has them: no batch would ever come that shows it, as a
                # server with such weights answers nothing
                if not self._model.weights_are_finite():
                    raise nonfinite_error(self.next_step, "the weights after the optimizer's step")
                self.phase.enter("publish")
            self._queue.commit(batch.used_ids)
            metrics = batch_metrics(batch, stats)
            taken = self._position
            self._position = taken.after_step(
                reward=metrics["rollout/reward"],
                epoch=self._queue.epoch,
                distance=stats.logprob_distance.of_current,
            )
        self._nonfinite_in_a_row = 0
        publishing = time.monotonic()
        try:
            self._publish(self.policy_version)
        finally:  # the step was taken, whatever became of its weights' way to the servers
            now = time.monotonic()
            stalls = self._checkpointer.stalls()  # for the state and the checkpoint since the line before
            timing = {
                "timeperf/rollout_s": batch.seconds,
                "timeperf/train_s": publishing - training - waited,
                "timeperf/publish_s": now - publishing,
                "timeperf/step_s": now - started - waited + sum(stalls.values()),
            }
            self._keep(taken, batch, metrics | timing | stalls)
        self._do_what_is_due()

    @contextmanager
    def _taking_step(self) -> Iterator[None]:
        """An error inside leaves the step half taken, and its weights in no checkpoint: an optimizer that ran out of
        memory has changed some and not others."""
        self._is_half_taken = True
        yield
        self._is_half_taken = False

    def _passes_check(self, batch: RolloutBatch) -> bool:
        decision = self._gate.check(batch, policy_version=self.policy_version, global_step=self.next_step)
        if not decision.admitted:
            self._reject(batch, decision)
        return decision.admitted

    def _gate_opens(self, batch: RolloutBatch, stats: UpdateStats) -> bool:
        try:
            decision = self._gate.admit(batch, stats)
        except Stopped:
            self._model.discard()
            raise
        if not decision.admitted:
            self._nonfinite_in_a_row = 0
            self._model.discard()
            self._reject(batch, decision)
        return decision.admitted

    def _is_finite(self, stats: UpdateStats, batch: RolloutBatch) -> bool:
        if stats.finite:
            return True
        self._model.discard()
        self._nonfinite_in_a_row += 1
        dropped = judge_nonfinite(
            stats,
            step=self.next_step,
            in_a_row=self._nonfinite_in_a_row,
            weights_are_finite=self._model.weights_are_finite(),
        )
        self._reject(batch, dropped)
        return False

    def _reject(self, batch: RolloutBatch, decision: Admission) -> None:
        self._queue.requeue(batch.used_ids)
        self._queue.abandon()  # what was made ahead: whatever spoilt this batch may have spoilt it too
        self._gate.rejected()
        self.rejections.add(batch, decision, self.next_step)

    def _keep(self, taken: RunPosition, batch: RolloutBatch, metrics: dict[str, float]) -> None:
        """The step at `taken` is committed: its state is kept, which holds its lines, and then these are written."""
        self.rejections.committed(taken.next_step)
        report = StepReport(
            global_step=taken.next_step,
            epoch=taken.epoch,
            epoch_step=taken.epoch_step,
            attempt=self._attempt,
            lineage=self._lineage,
            policy_version=self.policy_version,
            time=time.time(),
            prompt_ids=batch.prompt_ids,
            filtered_ids=batch.filtered_ids,
            weight_versions=batch.weight_versions,
            rollouts_failed=batch.failed,
            rollouts_retried=batch.retried,
            metrics=metrics,
        )

        def record() -> None:
            self.refusal = self._record(report, batch) or self.refusal

        self._checkpointer.step_done(ended_epoch=self._position.epoch != taken.epoch)
        self._checkpointer.keep(self._position, report, record)

    def _do_what_is_due(self) -> None:
        """After the last step: save and evaluate where it is time to."""
        if self._checkpointer.is_due:
            self._save()
        if self._checkpointer.evaluation_is_due:
            self._evaluate()
            self._checkpointer.evaluation_is_due = False

    def _evaluate(self) -> None:
        self.phase.enter("evaluate")
        report = self._rollouts.evaluate(self.policy_version)
        if report is None:
            return
        self._position = self._position.with_evals([*self.evals, report])
        self.evals = list(self._position.evals)
        self._journal.record("eval.done", subject="trainer", global_step=self.next_step - 1, **asdict(report))

    def forget(self) -> None:
        """The trainer ends: remove its state from memory where a checkpoint on disk holds it too."""
        self._checkpointer.forget(self._position)

    def _wait_to_step(self) -> float:
        """Until the last step is done, and what is being saved has been read. Returns the seconds that it took."""
        self.phase.enter("checkpoint")
        waited = self._checkpointer.wait_to_step()
        self.phase.enter("train")
        if self.refusal is not None:
            self._model.discard()
            raise Stopped
        return waited

    def _save(self) -> None:
        """Begin to save the last step, when the save before it has ended: one at a time. `_conclude` says what became
        of it. While the disk refuses something, it stays due."""
        self.phase.enter("checkpoint")
        self._conclude(required=False)
        if self.refusal is None:
            self._checkpointer.save(self._position)

    def _conclude(self, *, required: bool) -> None:
        """Where the disk refused a checkpoint the loop stops, and saves first when it is allowed to step again."""
        self._say_what_is_waited_for()
        self.refusal = self._checkpointer.conclude(required=required) or self.refusal

    def _say_what_is_waited_for(self) -> None:
        """A checkpoint may take far longer than any step: in the phase of one, the trainer would pass for hung."""
        if self._checkpointer.is_saving:
            self.phase.enter("checkpoint")

    def _save_what_is_sound(self) -> None:
        """Save before the loop ends with an error, which nothing here may hide; not within a step."""
        self._say_what_is_waited_for()
        self._checkpointer.settle()
        if self._is_half_taken:
            return
        try:
            self._model.discard()
            if self._model.weights_are_finite():
                self._save()
                self._conclude(required=False)
        except Exception as error:  # noqa: BLE001 - whatever ended the loop, as want of memory, may end this too
            reason = f"{type(error).__name__}: {error}"
            self._journal.record("checkpoint.failed", subject="trainer", reason=reason, global_step=self.next_step - 1)


def gradients_of(model: GradientModel, batch: RolloutBatch) -> UpdateStats:
    """The gradients of what is trained on, which wait for the commit; the distances of log-probs are of all servers.

    With actor.dynamic_sampling groups whose rewards are all equal are left out. Those of a server with damaged weights
    are: nothing that it made would ever be compared, while it used up prompts. So of each server that made nothing
    else, one group is compared: a forward pass, and a backward pass too where a sequence without an advantage has a
    gradient (a KL, an entropy, a mean over the batch), which is dropped.
    """
    unseen = batch.unseen_groups
    if not unseen:
        return model.compute_gradients(batch.groups)
    others = model.compute_gradients(unseen).logprob_distance  # first: the next call drops its gradients
    stats = model.compute_gradients(batch.groups)
    distance = stats.logprob_distance.beside(others, makers=_makers(batch.groups), other_makers=_makers(unseen))
    return replace(stats, logprob_distance=distance)


def _makers(groups: Iterable[RolloutGroup]) -> set[str]:
    return {rollout.completion.server for group in groups for rollout in group.rollouts}


def judge_nonfinite(stats: UpdateStats, *, step: int, in_a_row: int, weights_are_finite: bool) -> Admission:
    """Why a batch whose numbers are not finite is dropped. `in_a_row`: such batches, this one too. Where its advantages
    are not finite the rewards alone made them so, whatever the weights.

    Raises TrainerError where the weights are at fault or suspected, RewardError where the rewards are for good.
    """
    reason = "; ".join(stats.problems)
    is_lasting = in_a_row >= NONFINITE_IN_A_ROW
    if not weights_are_finite or (is_lasting and not stats.is_of_rewards):
        raise nonfinite_error(step, reason)
    if is_lasting:
        raise RewardError(f"step {step}: {reason}", "reward.fn is to answer numbers that float32 holds")
    cause = Cause.VERIFIER_BROKEN if stats.is_of_rewards else Cause.NONFINITE
    return Admission(admitted=False, reason=reason, cause=cause)


def nonfinite_error(step: int, reason: str) -> TrainerError:
    return TrainerError(
        f"step {step}: numbers that are not finite: {reason}",
        "actor.optimizer.lr, actor.optimizer.gradient_clipping and actor.dtype are the usual causes; "
        "recover.mode=auto resumes from the last checkpoint",
    )
