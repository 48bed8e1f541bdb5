"""One life of the trainer: puts the step loop's parts together, runs it, and answers while it runs. No Ray."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from actors.canaries import make_canaries, pick, score_canaries
from actors.checkpointing import Checkpointer
from actors.dataset import load_records
from actors.gate import Ask, MonitorGate
from actors.golden_probe import GREEDY, golden_distance
from actors.live_rollouts import LiveRollouts, LoopThread
from actors.policy_model import PolicyModel, UpdateStats, torch_dtype
from actors.prompt_queue import PromptQueue
from actors.reward_pool import RewardPool
from actors.rollout import RolloutEngine
from actors.server_pool import ServerPool
from actors.sglang_client import RequestFailed, SGLangClient
from actors.step_loop import GrpoLoop, no_gate
from actors.training_data import DataLoader
from actors.weight_publisher import WeightFolders, WeightPublisher
from launcher.config import RunConfig
from launcher.errors import ServerError, WeightsRefused
from launcher.journal import Journal, LineLog
from launcher.messages import (
    LoopFailure,
    RolloutBatch,
    ServerInfo,
    ServerState,
    Snapshot,
    StepReport,
    TrainerEnd,
    TrainerReady,
    TrainerStatus,
    TrainerView,
)
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canaries import CanaryRound
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_paths import RunPaths

MEMORY_BACKED = Path("/dev/shm")
PROBE_TIMEOUT_S = 5.0
CANARIES_FILE = "canaries.json"

log = logging.getLogger("trainer")


class Training:
    """Loaded when constructed, with nothing stepped: `restore` says from which state, `allow` and `run` go on from it.

    `restore` and `run` belong to one thread; the other methods may be called from any.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        *,
        ask: Ask | None = None,
    ) -> None:
        """Load model, data and reward function. `ask`: the HealthMonitor. Raises the UsageErrors of each."""
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._reports: list[StepReport] = []
        self._log_to_file()
        self._journal = Journal(paths.events, attempt, time.time)
        self._ledger = LineLog(paths.ledger, durable=True)
        self._metrics = LineLog(paths.metrics)
        self._thread = LoopThread("rollouts")
        self._reward = RewardPool(config.reward)  # its processes start while the model loads
        records = load_records(config.train_dataset, key="train_dataset")
        self._model = PolicyModel(
            config.actor,
            config.ref,
            temperature=config.gconfig.temperature,
            total_steps=planned_steps(config, prompts=len(records)),
            tokenizer_path=config.tokenizer_path,
        )
        context = config.sglang.context_length or self._model.context_length
        self._data = DataLoader(config, self._model.tokenizer, context, self._journal).load(records)
        self._thread.call(self._connect())
        scored = list(self._data.prompts.values())
        kept = paths.logs / CANARIES_FILE
        self._canaries = self._thread.call(make_canaries(scored, self._reward, keep_in=kept))
        self._gate = None if ask is None else MonitorGate(ask, away=self._monitor_away)
        self._queue = PromptQueue(list(self._data.prompts), seed=config.seed, shuffle=config.train_dataset.shuffle)
        self._first_position = self._queue.state_dict()
        self._checkpointer = Checkpointer(config, paths, self._journal)
        self._loop = self._assemble()
        self._busy, self._is_loaded, self._is_allowed, self._is_running = "", False, False, False
        self._is_finished = False
        self._failure: LoopFailure | None = None
        self._lineage = 0

    def ready(self) -> TrainerReady:
        return TrainerReady(
            next_step=self._loop.next_step,
            total_steps=self._loop.total_steps,
            steps_per_epoch=self._loop.steps_per_epoch,
            policy_version=self._loop.policy_version,
            prompts=len(self._data.prompts),
            held_out=len(self._data.held_out),
            left_out=self._data.left_out,
            pid=os.getpid(),
        )

    # ── on the train thread ──

    def restore(self, global_step: int, lineage: int) -> int:
        """Load the checkpoint of a step, or the first weights (-1); returns the step that is next.

        `lineage` counts the restores of the run, this one included. Raises CheckpointError: then nothing is loaded.
        """
        self._busy, self._is_loaded, self._is_finished, self._failure = "restoring", False, False, None
        try:
            with self._loop.weights_lock:
                if global_step == FIRST_WEIGHTS:
                    position = self._checkpointer.begin_anew(self._model, self._queue, self._first_position)
                else:
                    position = self._checkpointer.load_step(global_step, self._model, self._queue)
                self._loop.restore(position)
                self._lineage = lineage
                self._publisher.begin(lineage)
            self._is_loaded = True
        finally:
            self._busy = ""
        self._journal.record(
            "trainer.restored",
            subject="trainer",
            reason="to the first weights" if global_step == FIRST_WEIGHTS else f"from step {global_step}",
            global_step=self._loop.next_step - 1,
            lineage=lineage,
        )
        return self._loop.next_step

    def run(self) -> TrainerEnd:
        """Step until the end, or until paused; at once where it was not allowed. Raises RunError.

        So whoever wants to hear of the end may call it again: the second call waits for the first.
        """
        if self._is_allowed:
            self._is_running = True
            try:
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
        self._rollouts.allow()
        if self._gate is not None:
            self._gate.allow()
        self._failure = None
        self._is_allowed = True

    def pause(self, *, save: bool) -> None:
        """Let `run` return: at once while it waits for rollouts or the gate, else after the step under way."""
        self._loop.request_stop(save=save)
        self._rollouts.stop()
        if self._gate is not None:
            self._gate.stop()

    def send_weights(self, server: ServerInfo, version: int, lineage: int) -> None:
        """Send one server the current weights. Raises WeightsRefused where they are others by now, RequestFailed."""
        with self._loop.weights_lock:
            self._check_current(version, lineage)
            send = self._thread.call(self._publisher.prepare(version))
        self._thread.call(self._publisher.send_to(server, send, version))

    def admit(self, server: ServerInfo) -> float:
        """Give a server traffic if its weights prove to be ours; returns their distance in nats.

        Raises WeightsRefused, RequestFailed: it then stays STALE, with weights that nobody vouches for.
        """
        prompt = self._data.golden_prompt
        timeout_s = self._config.rollout.request_timeout
        try:
            distance = golden_distance(
                lambda: self._thread.call(
                    self._client.generate(server.url, token_ids=prompt, sampling=GREEDY, timeout_s=timeout_s)
                ),
                lambda tokens: self._own_logprobs(prompt, tokens),
                limit=golden_limit(self._config),
                name=server.name,
            )
        except ServerError as error:
            doubted = dataclasses.replace(server, state=ServerState.STALE, weight_version=None, reason=error.message)
            self.set_servers([doubted])
            raise
        with self._loop.weights_lock:  # no step may be published between this look and the admission
            lives = {(known.name, known.generation): known for known in self._pool.servers()}
            known = lives.get((server.name, server.generation), server)
            self.set_servers([dataclasses.replace(known, state=ServerState.READY, reason="")])
        return distance

    def _own_logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[float]]:
        with self._loop.weights_lock:
            return self._model.policy_version, self._model.logprobs(prompt, tokens)

    def _check_current(self, version: int, lineage: int) -> None:
        now = (self._model.policy_version, self._lineage)
        if (version, lineage) != now:
            raise WeightsRefused(f"the trainer has version {now[0]} after {now[1]} restores, not {version}, {lineage}")

    def view(self) -> TrainerView:
        """The state, consistent in itself: no step is committed while it is looked at."""
        if self._busy:
            return TrainerView(pid=os.getpid(), busy=self._busy, is_started=True)
        loop = self._loop
        with loop.weights_lock:
            return TrainerView(
                pid=os.getpid(),
                is_started=True,
                is_loaded=self._is_loaded,
                is_allowed=self._is_allowed,
                is_running=self._is_running,
                is_finished=self._is_finished,
                is_at_gate=self._gate is not None and self._gate.is_waiting,
                phase=loop.phase.name,
                progress=loop.phase.entered + self._pool.leases_ended,
                lineage=self._lineage,
                policy_version=loop.policy_version,
                next_step=loop.next_step,
                total_steps=loop.total_steps,
                longest_sequence=self._data.longest_sequence,
                failure=self._failure,
                rejections=loop.rejections.since_step,
                weights=self._publisher.newest,
                servers=self._pool.servers(),
                in_flight=self._pool.in_flight(),
                evals=tuple(loop.evals),
            )

    def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Tell the pool of rollouts which servers there are."""
        self._thread.call(self._pool.update(servers))

    def snapshot(self, since: int) -> Snapshot:
        """What is going on, and the steps committed in this life from the `since`-th on."""
        loop = self._loop
        status = TrainerStatus(
            phase=loop.phase.name,
            next_step=loop.next_step,
            total_steps=loop.total_steps,
            steps_per_epoch=loop.steps_per_epoch,
            policy_version=loop.policy_version,
            pid=os.getpid(),
            seconds_in_phase=time.monotonic() - loop.phase.since,
        )
        return Snapshot(
            status=status,
            servers=self._pool.servers(),
            reports=tuple(self._reports[since:]),
            evals=tuple(loop.evals),
        )

    def close(self) -> None:
        """Release what outlives a killed process: reward workers, folders in memory."""
        self._thread.call(self._disconnect())
        self._thread.close()
        self._reward.close()
        if self._folders is not None:
            self._folders.remove()

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self._paths.trainer_log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)

    async def _connect(self) -> None:
        """Make what lives on the asyncio loop, on it."""
        config, tokenizer = self._config, self._model.tokenizer
        self._client = SGLangClient()
        self._pool = ServerPool(self._weight_version_at, hold_timeout_s=None)
        engine = RolloutEngine(
            client=self._client,
            pool=self._pool,
            scorer=self._reward,
            config=config.rollout,
            decode=lambda ids: tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True),
        )
        self._rollouts = LiveRollouts(
            self._thread, engine, config=config, prompts=self._data.prompts, held_out=self._data.held_out
        )
        on_disk = config.actor.weight_update_mode == "disk"
        dtype = torch_dtype(config.sglang.dtype)
        self._folders = (
            WeightFolders(self._memory_folder(), lambda folder: self._model.export(folder, dtype)) if on_disk else None
        )
        self._publisher = WeightPublisher(
            self._client,
            self._pool,
            folders=self._folders,
            weights=lambda: dict(self._model.named_weights(dtype)),
            tp_size=config.sglang.tp_size,
            timeout_s=config.actor.weight_update_timeout,
        )

    async def _disconnect(self) -> None:
        await self._pool.close()
        await self._client.close()

    async def _weight_version_at(self, url: str) -> int | None:
        try:
            return (await self._client.model_info(url, timeout_s=PROBE_TIMEOUT_S)).weight_version
        except RequestFailed:
            return None

    def _memory_folder(self) -> Path:
        """One folder for each run, so that its next attempt finds and clears what this one was killed over."""
        digest = hashlib.sha256(str(self._paths.checkpoints.resolve()).encode()).hexdigest()[:12]
        root = MEMORY_BACKED if os.access(MEMORY_BACKED, os.W_OK) else self._paths.logs
        return root / f"grpo-weights-{digest}"

    def _assemble(self) -> GrpoLoop:
        return GrpoLoop(
            self._config,
            model=self._model,
            queue=self._queue,
            rollouts=self._rollouts,
            publish=self._publish,
            checkpointer=self._checkpointer,
            record=self._write_down,
            journal=self._journal,
            attempt=self._attempt,
            gate=no_gate if self._gate is None else self._ask_gate,
        )

    def _ask_gate(self, batch: RolloutBatch, stats: UpdateStats | None) -> Admission:
        assert self._gate is not None
        report = BatchReport.of(
            batch,
            policy_version=self._loop.policy_version,
            n_samples=self._config.gconfig.n_samples,
            global_step=self._loop.next_step,
            canaries=self.score_canaries().scores,
        )
        if stats is None:
            return self._gate(report)
        distance = stats.logprob_distance
        names = {server.url: server.name for server in self._pool.servers()}
        distances = {names[url]: by for url, by in distance.by_server.items() if url in names}
        return self._gate(dataclasses.replace(report, logprob_distance=distance.mean, distances=distances))

    def score_canaries(self) -> CanaryRound:
        """Ask the live reward function for answers that are known."""
        step = self._loop.next_step
        chosen = pick(self._canaries, self._config.gate.canaries, step)
        return CanaryRound(step=step, scores=self._thread.call(score_canaries(chosen, self._reward)))

    def _monitor_away(self, why: str) -> None:
        event = "gate.waiting" if why else "gate.answered"
        self._journal.record(event, subject="trainer", reason=why, global_step=self._loop.next_step)

    def _publish(self, version: int) -> None:
        """Where no server takes them the loop goes on to wait for one: to mend servers is the Coordinator's."""
        try:
            self._thread.call(self._publisher.publish(version))
        except WeightsRefused as error:
            self._journal.record("weights.refused", subject="trainer", reason=error.message, policy_version=version)

    def _write_down(self, report: StepReport) -> None:
        self._ledger.append(report.ledger_line())
        self._metrics.append(report.metrics_line())
        self._reports.append(report)
        log.info(
            "step %d: reward %.3f, policy_version %d",
            report.global_step,
            report.metrics["rollout/reward"],
            report.policy_version,
        )


def golden_limit(config: RunConfig) -> float:
    """The distance of one server's log-probs that its rounding explains, as at the gate."""
    is_exact = {config.sglang.dtype, config.actor.dtype} == {"float32"}
    limit = config.gate.distance_float32 if is_exact else config.gate.distance_unknown
    return math.inf if limit is None else limit


def planned_steps(config: RunConfig, *, prompts: int) -> int:
    """Length of the learning-rate schedule, in optimizer steps."""
    in_epochs = config.total_train_epochs * -(-prompts // config.train_dataset.batch_size)
    return min(in_epochs, config.total_train_steps or in_epochs)
