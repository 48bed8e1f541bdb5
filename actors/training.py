"""One life of the trainer: puts the step loop's parts together, runs it, and answers while it runs. No Ray."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from actors.checkpointing import Checkpointer
from actors.dataset import Record, build_prompts, load_records
from actors.live_rollouts import LiveRollouts, LoopThread
from actors.policy_model import PolicyModel, torch_dtype
from actors.prompt_queue import PromptQueue
from actors.reward_pool import RewardPool
from actors.rollout import RolloutEngine
from actors.server_pool import ServerPool
from actors.sglang_client import RequestFailed, SGLangClient
from actors.step_loop import GrpoLoop
from actors.weight_publisher import WeightFolders, WeightPublisher
from launcher.config import DatasetConfig, RunConfig
from launcher.journal import Journal, LineLog
from launcher.messages import Prompt, ServerInfo, Snapshot, StepReport, TrainerEnd, TrainerReady, TrainerStatus
from launcher.run_paths import RunPaths

MEMORY_BACKED = Path("/dev/shm")
PROBE_TIMEOUT_S = 5.0

log = logging.getLogger("trainer")


class Training:
    """Complete when constructed. `run` belongs to one thread; the other methods may be called from any."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int, resume_from: Path | None) -> None:
        """Load model, data and reward function. Raises the UsageErrors of each, and CheckpointError."""
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
        self._prompts, self._left_out = self._encode(records, config.train_dataset, "train_dataset")
        self._held_out = self._load_held_out()
        self._thread.call(self._connect())
        self._loop = self._assemble(resume_from)

    def ready(self) -> TrainerReady:
        return TrainerReady(
            next_step=self._loop.next_step,
            total_steps=self._loop.total_steps,
            steps_per_epoch=self._loop.steps_per_epoch,
            policy_version=self._loop.policy_version,
            prompts=len(self._prompts),
            held_out=len(self._held_out),
            left_out=self._left_out,
            pid=os.getpid(),
        )

    def run(self) -> TrainerEnd:
        """Step until the end or until stopped. Raises RunError where it can't go on."""
        try:
            finished = self._loop.run()
        except Exception:
            log.exception("the step loop ended with an error")
            raise
        return TrainerEnd(finished=finished, next_step=self._loop.next_step, evals=tuple(self._loop.evals))

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

    def request_stop(self) -> None:
        """Let `run` save and return: at once while it waits for rollouts, else after the step under way."""
        self._loop.request_stop()
        self._rollouts.stop()

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

    def _load_held_out(self) -> dict[str, Prompt]:
        dataset = self._config.valid_dataset
        if dataset is None:
            return {}
        return self._encode(load_records(dataset, key="valid_dataset"), dataset, "valid_dataset")[0]

    def _encode(self, records: Sequence[Record], dataset: DatasetConfig, key: str) -> tuple[dict[str, Prompt], int]:
        """The prompts by id, and how many were left out as longer than the data set's max_length."""
        context = self._config.sglang.context_length or self._model.context_length
        prompts, left_out = build_prompts(
            records,
            self._model.tokenizer,
            max_prompt_tokens=None if context is None else context - self._config.gconfig.max_new_tokens,
            max_length=dataset.max_length,
            key=key,
        )
        if left_out:
            self._journal.record("data.left_out", subject=key, reason=f"over {key}.max_length", prompts=left_out)
        return {prompt.id: prompt for prompt in prompts}, left_out

    async def _connect(self) -> None:
        """Make what lives on the asyncio loop, on it."""
        config, tokenizer = self._config, self._model.tokenizer
        self._client = SGLangClient()
        self._pool = ServerPool(self._weight_version_at, hold_timeout_s=config.rollout.setup_timeout)
        engine = RolloutEngine(
            client=self._client,
            pool=self._pool,
            scorer=self._reward,
            config=config.rollout,
            decode=lambda ids: tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True),
        )
        self._rollouts = LiveRollouts(
            self._thread, engine, config=config, prompts=self._prompts, held_out=self._held_out
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

    def _assemble(self, resume_from: Path | None) -> GrpoLoop:
        config = self._config
        queue = PromptQueue(list(self._prompts), seed=config.seed, shuffle=config.train_dataset.shuffle)
        checkpointer = Checkpointer(config, self._paths, self._journal)
        loop = GrpoLoop(
            config,
            model=self._model,
            queue=queue,
            rollouts=self._rollouts,
            publish=self._publish,
            checkpointer=checkpointer,
            record=self._write_down,
            journal=self._journal,
            attempt=self._attempt,
        )
        if resume_from is not None:
            loop.restore(checkpointer.load(resume_from, self._model, queue))
            self._journal.record(
                "trainer.restored", subject="trainer", reason=f"from {resume_from.name}", global_step=loop.next_step - 1
            )
        return loop

    def _publish(self, version: int) -> None:
        self._thread.call(self._publisher.publish(version))

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


def planned_steps(config: RunConfig, *, prompts: int) -> int:
    """Length of the learning-rate schedule, in optimizer steps."""
    in_epochs = config.total_train_epochs * -(-prompts // config.train_dataset.batch_size)
    return min(in_epochs, config.total_train_steps or in_epochs)
