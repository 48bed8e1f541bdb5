"""One incarnation of the trainer: assembles the step loop, runs it, and answers questions meanwhile. No Ray."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from actors.data.dataset import DataRecord
from actors.data.prompt_queue import PromptQueue
from actors.data.training_data import DataLoader, TrainingData, in_epoch, queue_of, record_bad
from actors.model.policy_model import PolicyModel, Ranks
from actors.processes.loop_thread import LoopThread
from actors.reward.data_check import records_of
from actors.reward.known_answers import KeptScores, KnownRounds, learn_from_records, learn_given, read_given
from actors.reward.recorded_answers import RecordedAnswers
from actors.reward.reward_pool import RewardPool
from actors.training.admission_gate import AdmissionGate, Ask
from actors.training.checkpointing import Checkpointer
from actors.training.step_loop import GrpoLoop
from actors.training.step_records import SampleLog, StepRecords, cut_reason, no_score_reason
from actors.training.training_servers import TrainingServers
from launcher.base.disk_faults import Refusal
from launcher.base.errors import TrainerError
from launcher.base.messages import (
    LoopFailure,
    StepReport,
    TrainerEnd,
    TrainerReady,
    TrainerView,
)
from launcher.base.rollouts import RolloutBatch
from launcher.config.data import DatasetConfig
from launcher.config.schedule import steps_in_all
from launcher.config.schema import RunConfig
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

CANARIES_FILE = "canaries.json"
RECORDED_FILE = "recorded_answers.json"

log = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """What a trainer loads whatever step it continues from: the model with its first weights, the prompts as token ids.
    Loaded with `config`, and of use with the same settings only."""

    config: RunConfig
    model: PolicyModel
    data: TrainingData

    @classmethod
    def load(
        cls, config: RunConfig, journal: Journal, *, reward: RewardPool | None = None, ranks: Ranks | None = None
    ) -> TrainingParts:
        """`reward`: for data whose bad records are skipped. Raises the UsageErrors of each, and TrainerError where the
        `ranks` don't meet.
        """
        scorer = None if config.rollout.episode else reward
        records = {key: _read(dataset, key, scorer, journal) for key, dataset in config.datasets().items()}
        model = PolicyModel(
            config.actor,
            config.ref,
            temperature=config.gconfig.temperature,
            total_steps=planned_steps(config, records),
            tokenizer_path=config.tokenizer_path,
            ranks=ranks,
        )
        context = config.sglang.context_length or model.context_length
        data = DataLoader(config, model.tokenizer, context, journal).load(records)
        return cls(config=config, model=model, data=data)


def can_be_loaded_ahead(config: RunConfig) -> bool:
    """Without the reward function."""
    return not any(dataset.bad_records == "skip" for dataset in config.datasets().values())


def _read(dataset: DatasetConfig, key: str, reward: RewardPool | None, journal: Journal) -> list[DataRecord]:
    """Without those that were skipped. That the others fit was checked before anything was started."""
    records, bad = records_of(dataset, reward if dataset.bad_records == "skip" else None, key=key)
    record_bad(journal, bad, key)
    return records


def planned_steps(config: RunConfig, records: Mapping[str, Sequence[DataRecord]]) -> int:
    """Length of the learning-rate schedule, in optimizer steps."""
    training = [(one, len(records[key])) for key, one in config.datasets().items() if key.startswith("train")]
    prompts = sum(in_epoch(one.weight, count) for one, count in training)
    return steps_in_all(config, -(-prompts // config.train_dataset.batch_size))


class Training:
    """Constructed, it has loaded everything and taken no step: call `restore`, `allow`, then `run`.

    `restore` and `run` belong to one thread; the other methods, and those of `servers`, may be called from any.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        *,
        ask: Ask | None = None,
        ranks: Ranks | None = None,
        parts: TrainingParts | None = None,
    ) -> None:
        """Load model, data and reward function. `ask`: the HealthMonitor. `parts`: loaded while this process was
        parked. Raises the UsageErrors of each, and TrainerError where the `ranks` don't meet.
        """
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._log_to_file()
        self._journal = Journal(paths.events, attempt, time.time)
        self._records = StepRecords(paths)
        self._has_told_no_score = False
        self._thread = LoopThread("rollouts")
        # its processes start while the model loads
        self._reward = RewardPool(config.reward, config.own_rewards(), thread=self._thread)
        if parts is None or parts.config != config:
            parts = TrainingParts.load(config, self._journal, reward=self._reward, ranks=ranks)
        self._model = parts.model
        self._data = parts.data
        weights_lock = threading.RLock()
        self.servers = TrainingServers(
            config,
            paths,
            self._journal,
            thread=self._thread,
            model=self._model,
            data=self._data,
            reward=self._reward,
            weights_lock=weights_lock,
            usual_distance=lambda: self._loop.usual_distance,  # asked when a server is admitted: the loop is there then
        )
        plays = config.rollout.episode is not None  # it alone can tell what its samples earn
        scored = [] if plays else list(self._data.prompts.values())
        kept, given = KeptScores(paths.logs / CANARIES_FILE), read_given(config)
        learnt = self._thread.call(learn_given(given, self._reward, kept))
        self._known = KnownRounds(
            learnt or self._thread.call(learn_from_records(scored, self._reward, kept)),
            self._reward,
            kept,
            count=config.gate.canaries,
            submit=self._thread.submit,
            tolerance=config.reward_health.canary_tolerance,
        )
        self._recorded = RecordedAnswers(
            self._data.prompts,
            self._reward,
            count=0 if plays else config.gate.recorded,
            keep_in=paths.logs / RECORDED_FILE,
            submit=self._thread.submit,
            replay=self._replay,
        )
        self._gate = AdmissionGate(
            config,
            self._journal,
            ask=ask,
            score=self._known.begin,
            servers=self.servers.pool.servers,
            record=self._recorded,
            doubt=self.servers.doubt,
            lineage=lambda: self.servers.publisher.lineage,
            usual_distance=lambda: self._loop.usual_distance,
        )
        self._queue = queue_of(config, self._data)
        self._first_position = self._queue.state_dict()
        self._checkpointer = Checkpointer(config, paths, self._journal, self._model, self._queue)
        self._samples = SampleLog(
            paths, config.stats_logger, lambda ids: self._model.tokenizer.batch_decode([list(one) for one in ids])
        )
        self._loop = self._assemble(weights_lock)
        self._busy = ""
        self._is_loaded = False
        self._is_allowed = False
        self._is_running = False
        self._is_finished = False
        self._failure: LoopFailure | None = None

    def ready(self) -> TrainerReady:
        return TrainerReady(
            next_step=self._loop.next_step,
            total_steps=self._loop.total_steps,
            steps_per_epoch=self._loop.steps_per_epoch,
            policy_version=self._loop.policy_version,
            prompts=len(self._queue),
            held_out=len(self._data.held_out),
            left_out=self._data.left_out,
            pid=os.getpid(),
        )

    # ── on the train thread ──

    def restore(self, global_step: int, lineage: int, incident: int | None = None) -> int:
        """Load the checkpoint of a step, or the first weights (-1); returns the number of the next step.

        `lineage` counts the restores of the run, this one included. `incident`: the one that it repairs. Raises
        CheckpointError, or DataError as PromptQueue does: then nothing is loaded.
        """
        self._busy = "restoring"
        self._is_loaded = False
        self._is_finished = False
        self._failure = None
        try:
            self.servers.rollouts.abandon()
            with self._loop.changing():
                if global_step == FIRST_WEIGHTS:
                    restored = self._checkpointer.begin_anew(self._first_position)
                else:
                    restored = self._checkpointer.load_step(global_step)
                last = restored.last
                if last is not None and last.attempt <= self._attempt:  # else of another machine's logs
                    self._records.complete(last)
                self._loop.restore(restored.position, lineage)
                self.servers.begin(lineage)
            self._is_loaded = True
        finally:
            self._busy = ""
        where = "from memory" if restored.is_from_memory else "from the disk"
        self._journal.record(
            "trainer.restored",
            subject="trainer",
            reason="to the first weights" if global_step == FIRST_WEIGHTS else f"to step {global_step}, {where}",
            global_step=self._loop.next_step - 1,
            incident=incident,
            lineage=lineage,
            # Once more: no Coordinator may have lived to write `trainer.started`, and without them nobody can say
            # whether steps are missing at the end.
            prompts=len(self._queue),
            total_steps=self._loop.total_steps,
        )
        return self._loop.next_step

    def run(self) -> TrainerEnd:
        """Step until the end or until paused; return at once where `allow` was not called. Raises RunError.

        A second call waits for the first, so a caller that lost the answer may ask again.
        """
        if self._is_allowed:
            self._is_running = True
            try:
                self._journal.write_waiting()
                self._loop.refusal = self._records.refusal()
                self._is_finished = self._loop.run()
            except Exception as error:
                log.exception("the step loop ended with an error")
                self._failure = LoopFailure(
                    kind=type(error).__name__, message=str(error), global_step=self._loop.next_step
                )
                raise
            finally:
                self._is_allowed = self._is_running = False
        return TrainerEnd(finished=self._is_finished, next_step=self._loop.next_step, evals=tuple(self._loop.evals))

    # ── from any thread ──

    def allow(self) -> None:
        """The next `run` steps."""
        self._loop.allow()
        self.servers.rollouts.allow()
        self._gate.allow()
        self._failure = self.servers.refusal = None
        self._is_allowed = True

    def pause(self, *, save: bool) -> None:
        """Make `run` return: at once while it waits for rollouts or the gate, else after the current step."""
        self._loop.request_stop(save=save)
        self.servers.rollouts.stop()
        self._gate.stop()

    def view(self) -> TrainerView:
        """A consistent state: no step is committed while it is read."""
        lost = self._model.lost
        if self._busy and not lost:
            return TrainerView(pid=os.getpid(), busy=self._busy, is_started=True)
        loop, publisher = self._loop, self.servers.publisher
        with nullcontext() if lost else loop.view_lock:  # whoever waits for a lost rank may hold it for good
            loading = publisher.loading()  # before the servers and after them, as it goes on meanwhile
            servers = self.servers.pool.servers()
            return TrainerView(
                pid=os.getpid(),
                is_started=True,
                is_loaded=self._is_loaded,
                is_allowed=self._is_allowed,
                is_running=self._is_running,
                is_finished=self._is_finished,
                is_at_gate=self._gate.is_waiting,
                phase=loop.phase.name,
                progress=loop.phase.entered + self.servers.progress,
                lineage=publisher.lineage,
                policy_version=loop.policy_version,
                next_step=loop.next_step,
                total_steps=loop.total_steps,
                steps_per_epoch=loop.steps_per_epoch,
                seconds_in_phase=time.monotonic() - loop.phase.since,
                longest_sequence=self._data.longest_sequence,
                largest_micro_batch=self._model.largest_micro_batch,
                failure=self._failure or self._failure_of_ranks(),
                refusal=loop.refusal or self.servers.refusal,
                is_saving=self._checkpointer.is_saving,
                rejections=loop.rejections.since_step,
                weights=publisher.newest,
                servers=servers,
                in_flight=self.servers.pool.in_flight(),
                loading=tuple(sorted({*loading, *publisher.loading()})),
                evals=tuple(loop.evals),
            )

    def _failure_of_ranks(self) -> LoopFailure | None:
        if not self._model.lost:
            return None
        return LoopFailure(kind=TrainerError.__name__, message=self._model.lost, global_step=self._loop.next_step)

    def close(self) -> None:
        """Release what outlives a killed process: reward workers, folders in memory."""
        self._loop.forget()
        self._reward.close()  # before the servers, which end the thread that it is on
        self.servers.close()
        self._model.close()

    def _log_to_file(self) -> None:
        handler = PatientFileHandler(self._paths.trainer_log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)

    def _assemble(self, weights_lock: threading.RLock) -> GrpoLoop:
        return GrpoLoop(
            self._config,
            model=self._model,
            queue=self._queue,
            rollouts=self.servers.rollouts,
            publish=self.servers.publish,
            checkpointer=self._checkpointer,
            record=self._write_down,
            journal=self._journal,
            attempt=self._attempt,
            gate=self._gate,
            weights_lock=weights_lock,
        )

    def _write_down(self, report: StepReport, batch: RolloutBatch) -> Refusal | None:
        refusal = self._records.write(report)
        self._samples.keep(report, batch)
        if report.global_step == 0 and (reason := cut_reason(report.metrics, self._config.gconfig.max_new_tokens)):
            self._journal.record("rollouts.cut", subject="policy", reason=reason, global_step=0)
        if batch.no_score and not self._has_told_no_score:  # once: trainer.log has each, and most runs have one kind
            self._has_told_no_score = True
            self._journal.record(
                "reward.no_score", subject="reward", reason=no_score_reason(batch), global_step=report.global_step
            )
        return refusal

    def _replay(self, queue: PromptQueue, want: int, weight_version: int) -> RolloutBatch:
        """It is a rollout to whoever watches: where no server is ready, the trainer waits for one and doesn't hang."""
        before = self._loop.phase.name
        self._loop.phase.enter("rollout")
        try:
            return self.servers.rollouts.collect_apart(queue, want=want, weight_version=weight_version)
        finally:
            self._loop.phase.enter(before)

    def score_canaries(self) -> CanaryRound:
        """Score the known answers, and the run's own, with the live reward function."""
        step = self._loop.next_step
        known, rescored = self._known.begin(step), self._recorded.rescore()
        own = () if rescored is None else (rescored,)
        return CanaryRound(step=step, scores=(*known.result(), *own))


class PatientFileHandler(logging.FileHandler):
    """A log file for a process that must continue when the disk refuses its lines: it counts them, and says how many.
    `lost`: lines that the disk refused since the last one that it took."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)  # else a disk that is full now would refuse the file, and so the process
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self.lost
        try:
            super().emit(record)
        except OSError:  # the file can't be opened
            self.handleError(record)
        if before and self.lost == before:
            self.lost = 0
            said = f"{before} lines of this log were lost: the disk refused them"
            super().emit(logging.LogRecord("log", logging.WARNING, __file__, 0, said, (), None))

    def handleError(self, record: logging.LogRecord) -> None:
        """Of logging: called where a line could not be written, or not even be made of its arguments."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        self.lost += 1
        try:
            self.close()  # opened again by the next line
        except OSError:  # what it held back is lost with the line
            return
