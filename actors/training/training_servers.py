"""The trainer's connection to the servers: their list, rollouts from them, weights to them, and their admission.

Everything runs on an asyncio loop on a separate thread; the methods of TrainingServers may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import assert_never

from actors.data.training_data import TrainingData
from actors.data.turn_ends import completion_texts
from actors.episodes.episode_runner import EpisodeRunner
from actors.episodes.turn_tokens import TurnTokens
from actors.model.policy_model import PolicyModel, torch_dtype
from actors.processes.loop_thread import LoopThread
from actors.reward.reward_pool import RewardPool
from actors.rollout.rollout_engine import LiveRollouts, RolloutEngine
from actors.serving.group_address import group_address
from actors.training.step_memory import LONGEST_REASON
from actors.weights.group_transport import GroupTransport
from actors.weights.servers import Servers
from actors.weights.weight_consistency_check import GREEDY, SOON_S, GoldenComparison, logprob_distance
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import FallbackTransport, NamedWeights, TensorTransport, WeightTransport
from launcher.base.disk_faults import Refusal, fault_of
from launcher.base.durable import refusal_of
from launcher.base.errors import WeightsRefused
from launcher.base.messages import ServerInfo, ServerKey
from launcher.base.rollouts import Completion
from launcher.base.wording import in_one_line
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.checkpoints.model_files import vocabulary_of
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import find_trainer_cause
from launcher.policy.restart_budget import wait_s
from launcher.run_files.journal import Journal
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths


def is_out_of_memory(error: Exception) -> bool:
    """As the Coordinator finds it of a trainer that ends with this error."""
    return find_trainer_cause(f"{type(error).__name__}: {error}".splitlines(), None).ran_out is not None


class PolicyServers(Servers):
    """Of the launcher's own trainer, whose model says what the log-probs should be. Made on the loop."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        *,
        model: PolicyModel,
        golden_prompt: Sequence[int],
        weights_lock: threading.RLock,
        usual_distance: Callable[[], float | None],
    ) -> None:
        """`weights_lock`: the step loop's, held while the weights change. `usual_distance`: of its batches, in nats."""
        super().__init__(config, ServerKeys.read(paths.keys), prompt=golden_prompt, sampling=GREEDY)
        self._usual_distance = usual_distance
        self.client.vocabulary = vocabulary_of(model.folder)
        self._journal = journal
        self._model = model
        self._golden_prompt = golden_prompt
        self._weights_lock = weights_lock
        self._root = memory_folder(paths, "weights")
        self.folders: WeightFolders | None = None
        self.publisher = WeightPublisher(
            self.pool,
            self._new_transport(),
            finish_s=config.rollout.finish_s if config.rollout.max_head_offpolicyness > 0 else None,
        )

    def _new_transport(self) -> WeightTransport:
        """As the setting says, which `hardware` chooses by where the servers are."""
        actor, sglang, model = self.config.actor, self.config.sglang, self._model
        dtype, timeout_s = torch_dtype(sglang.dtype), actor.weight_update_timeout
        fast: WeightTransport

        def weights() -> NamedWeights:
            return model.named_weights(dtype)

        match actor.weight_update_mode:
            case "disk":
                return self._to_folders()
            case "tensor":
                what = "tensors"
                fast = TensorTransport(self.client, weights, tp_size=sglang.tp_size, timeout_s=timeout_s)
            case "xccl":
                what = "weights over its group"
                fast = GroupTransport(
                    self.client,
                    weights,
                    device=model.device,
                    tp_size=sglang.tp_size,
                    timeout_s=timeout_s,
                    address=group_address(self.config),
                )
            case _:
                assert_never(actor.weight_update_mode)
        return FallbackTransport(
            fast,
            self._fall_back,
            what=what,
            is_living=self.pool.is_living,
            again=lambda: self._journal.record("weights.fast_again", subject="trainer"),
        )

    def _fall_back(self, reason: str) -> FolderTransport:
        folders = self._to_folders()
        self._journal.record("weights.by_files", subject="trainer", reason=reason)
        return folders

    def _to_folders(self) -> FolderTransport:
        dtype = torch_dtype(self.config.sglang.dtype)
        if self.folders is None:
            self.folders = WeightFolders(self._root, lambda folder: self._model.export(folder, dtype))
        return FolderTransport(self.client, self.folders, timeout_s=self.config.actor.weight_update_timeout)

    @property
    def version(self) -> int:
        return self._model.policy_version

    @property
    def usual_distance(self) -> float | None:
        return self._usual_distance()

    @property
    def version_served(self) -> int:
        """While new weights are made ready for the servers, these still answer with those before."""
        published = self.publisher.version
        return self.version if published is None else published

    async def compare(self, server: ServerInfo, answer: Completion) -> GoldenComparison:
        while (compared := await asyncio.to_thread(self._compared, answer)) is None:
            await asyncio.sleep(SOON_S)
        return compared

    def _compared(self, answer: Completion) -> GoldenComparison | None:
        """None while the weights change. To wait for the lock would hold a thread of the loop, and who holds the lock
        waits for one that writes the weights."""
        if not self._weights_lock.acquire(blocking=False):
            return None
        try:
            own = self._model.logprobs(self._golden_prompt, answer.token_ids)
            return GoldenComparison(version=self.version, distance=logprob_distance(answer.logprobs, own))
        finally:
            self._weights_lock.release()

    async def close(self) -> None:
        await super().close()
        if self.folders is not None:
            self.folders.remove()


class TrainingServers:
    """`thread` runs it; `rollouts` is the step loop's source; `publisher` sends the weights."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        *,
        thread: LoopThread,
        model: PolicyModel,
        data: TrainingData,
        reward: RewardPool,
        weights_lock: threading.RLock,
        usual_distance: Callable[[], float | None],
    ) -> None:
        """`weights_lock`: the step loop's, held while the weights change. `usual_distance`: of its batches, in nats."""
        self._config = config
        self._journal = journal
        self._thread = thread
        self._model = model
        self._data = data
        self._weights_lock = weights_lock
        self._usual_distance = usual_distance
        self.refusal: Refusal | None = None
        thread.call(self._connect(paths, reward))

    async def _connect(self, paths: RunPaths, reward: RewardPool) -> None:
        """Create the objects of the asyncio loop, on it."""
        config, model, journal = self._config, self._model, self._journal
        self._servers = PolicyServers(
            config,
            paths,
            journal,
            model=model,
            golden_prompt=self._data.golden_prompt,
            weights_lock=self._weights_lock,
            usual_distance=self._usual_distance,
        )
        self.pool = self._servers.pool
        self.publisher = self._servers.publisher
        self._episodes = None if config.rollout.episode is None else await self._begin_episodes()
        engine = RolloutEngine(
            client=self._servers.client,
            pool=self.pool,
            scorer=reward,
            config=config.rollout,
            decode=lambda ids: completion_texts(model.tokenizer, ids),
            episodes=self._episodes,
            told=lambda event, server, reason: journal.record(event, subject=server, reason=reason),
        )
        self.rollouts = LiveRollouts(
            self._thread,
            engine,
            config=config,
            prompts=self._data.prompts,
            held_out=self._data.held_out,
            newest=lambda: self._servers.version_served,
        )

    async def _begin_episodes(self) -> EpisodeRunner:
        config = self._config
        turns = TurnTokens(self._model.tokenizer, config.chat)
        turns.check_template()
        room = (config.sglang.context_length or self._model.context_length, config.sglang.max_total_tokens)
        longest = min(config.actor.mb_spec.max_tokens_per_mb, *(tokens for tokens in room if tokens is not None))
        runner = EpisodeRunner(config, turns, longest=longest)
        await runner.start()
        return runner

    @property
    def progress(self) -> int:
        """Changes while requests are answered, or agents are at work."""
        return self.pool.released + (0 if self._episodes is None else self._episodes.progress)

    def begin(self, lineage: int) -> None:
        """From now on the weights are those after the `lineage`-th restore."""
        self._thread.call(self.publisher.begin(lineage))

    def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        self._thread.call(self.pool.update(servers))

    def doubt(self, key: ServerKey, reason: str) -> None:
        """This incarnation made a batch that was rejected for its weights: no traffic until it has been sent others."""
        self._thread.call(self.pool.mark_stale(key, reason))

    def drain(self, name: str, *, within_s: float) -> int:
        """Remove a server: no new requests; those in flight finish or are migrated. Returns how many were migrated."""
        return self._thread.call(self.pool.drain(name, within_s=within_s))

    def limit_rollouts(self, max_concurrent: int) -> None:
        """At most so many prompts in flight from now on, in the batch under way too."""
        self._thread.call(self.pool.limit(max_concurrent * self._config.gconfig.n_samples))

    def publish(self, version: int) -> None:
        """Where no server takes them, the loop waits for one: the Coordinator repairs servers.

        Where memory is wanting to make them ready no server is at fault, and the restart of a sound one would not
        help: it is tried again, `restart.retry` times. Then that is raised, and the trainer begins anew with less.
        """
        settings = self._config.restart
        for tries in range(settings.retry):
            try:
                self._publish_once(version)
                return
            except Exception as error:
                if self._model.lost or not is_out_of_memory(error):
                    raise
                reason = f"weight version {version} was not made ready for the servers: {type(error).__name__}: {error}"
                self._refused(in_one_line(reason, longest=LONGEST_REASON), version)
            time.sleep(wait_s(tries, settings))  # outside the handler, whose traceback holds what was allocated
        self._publish_once(version)

    def _publish_once(self, version: int) -> None:
        try:
            self._thread.call(self._servers.publish(version))
        except WeightsRefused as error:
            self._note_refusal(error)
            self._refused(error.message, version)

    def _refused(self, reason: str, version: int) -> None:
        self._journal.record("weights.refused", subject="trainer", reason=reason, policy_version=version)

    def _note_refusal(self, error: WeightsRefused) -> None:
        """For the Coordinator, where no server is at fault but the folder that they read from. The run waits for as
        much room as the last weights took: with less, loading would fail again and use up the servers' budgets."""
        own = error.__cause__  # what a server said has none
        folders = self._servers.folders
        if folders is not None and own is not None and (fault := fault_of(own)) is not None:
            self.refusal = refusal_of(folders.parent, fault, needed=folders.newest_bytes)

    def send_weights(self, server: ServerInfo, lineage: int) -> int:
        """Send one server the current weights and return their version, which may be newer than when this was ordered.

        While other servers serve, the trainer keeps stepping: an order for a fixed version would always be too late.
        Raises WeightsRefused where they are those of another restore, RequestFailed.
        """
        with self._weights_lock:
            if lineage != self.publisher.lineage:
                raise WeightsRefused(f"the trainer was restored {self.publisher.lineage} times by now, not {lineage}")
            version = self._model.policy_version
            try:
                send = self._thread.call(self.publisher.prepare(version))
            except WeightsRefused as error:
                self._note_refusal(error)
                raise
        return self._thread.call(self.publisher.send_to(server, send, version))

    def admit(self, server: ServerInfo) -> float | None:
        """As of Servers."""
        return self._thread.call(self._servers.admit(server))

    def close(self) -> None:
        """Ends the thread too."""
        self._thread.call(self._disconnect())
        self._thread.close()

    async def _disconnect(self) -> None:
        if self._episodes is not None:
            await self._episodes.close()
        await self._servers.close()
