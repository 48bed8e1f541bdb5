"""The servers behind the door of another project's trainer: which may answer, and which weights they hold.

In the place of `actors/training/training_servers.py`: the weights are those that the trainer gave last, as folders.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from actors.foreign.kept_weights import LINEAGE, KeptWeights
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import RequestFailed, SGLangClient
from actors.weights.server_admission import ServerAdmission, token_probe
from actors.weights.weight_consistency_check import GREEDY, TRIES, GoldenComparison
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys

PROMPT = tuple(range(1, 17))
"""The first tokens of any vocabulary: what they mean does not matter to a comparison."""
GOLDEN = dataclasses.replace(GREEDY, seed=0)
AGAIN_S = 2.0


class DoorServers:
    """Used on one asyncio loop. `waits_for`: why new weights are not loaded yet; "" where nothing is wrong."""

    def __init__(self, config: RunConfig, keys: ServerKeys, kept: KeptWeights) -> None:
        self._config = config
        self._kept = kept
        self.client = SGLangClient(keys)
        self.pool = ServerPool(token_probe(self.client, PROMPT, within_s=config.health.silence_max_s))
        if kept.state.paused:
            self.pool.pause()
        self.publisher = WeightPublisher(
            self.client,
            self.pool,
            folders=kept.folders,
            weights=tuple,
            tp_size=config.sglang.tp_size,
            timeout_s=config.actor.weight_update_timeout,
        )
        self.publisher.lineage, self.publisher.newest = LINEAGE, kept.newest
        self.is_publishing = False
        self.waits_for = ""
        self._updating = asyncio.Lock()
        loop = asyncio.get_running_loop()
        # Threads of its own: in the loop's few, servers that wait for new weights would keep these from being written.
        self._admitting = ThreadPoolExecutor(config.sglang.n_servers, thread_name_prefix="admission")
        self._admission = ServerAdmission(
            self.client,
            self.pool,
            config,
            call=lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(),
            prompt=PROMPT,
            sampling=GOLDEN,
            compare=self._compare,
            settled=self._settled,
        )

    @property
    def version(self) -> int:
        return self._kept.state.version

    async def update(self, source: Path) -> None:
        """Keep the weights in a folder, and have the servers load them: returns when one holds them and may answer.

        A server that is lost meanwhile is waited for. Raises WeightsRefused where the folder holds no weights."""
        async with self._updating:
            if not await asyncio.to_thread(self._kept.has, source):
                version = await self._take(source)
                try:
                    await self.publisher.publish(version)
                except WeightsRefused as error:  # by every server: the Coordinator restarts or loads them
                    self.waits_for = error.message
                finally:
                    self.is_publishing = False
            await self.pool.until_served(self.newest)
            self.waits_for = ""
            self.serves()

    async def _take(self, source: Path) -> int:
        """A disk that refuses the files is waited for: an error would end the trainer.

        The servers count as being sent a version before it counts, else they would seem to hold wrong weights."""
        while True:
            self.is_publishing = True
            try:
                version = await asyncio.to_thread(self._kept.take, source)
            except (WeightsRefused, OSError) as error:
                self.is_publishing = False
                if isinstance(error, WeightsRefused) and not isinstance(error.__cause__, OSError):
                    raise
                self.waits_for = str(error)
                await asyncio.sleep(AGAIN_S)
            else:
                self.waits_for = ""
                return version

    def newest(self) -> int:
        """The version that a request is answered by, whenever a server is found for it."""
        return self.version

    def serves(self) -> None:
        """A server has answered once: the door counts as healthy from now on."""
        self._kept.note(serves=True)

    # ── what the Coordinator orders; as of the trainer ──

    async def send_weights(self, server: ServerInfo) -> int:
        """Raises WeightsRefused where none were given yet, RequestFailed."""
        version = self.version
        if self._kept.newest is None:
            raise WeightsRefused("the trainer has given no weights yet: a server starts from sglang.model_path")
        send = await self.publisher.prepare(version)
        await self.publisher.send_to(server, send, version)
        return version

    async def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        await self.pool.update(dataclasses.replace(server, lineage=LINEAGE) for server in servers)

    async def admit(self, server: ServerInfo) -> float | None:
        """As of ServerAdmission."""
        known = dataclasses.replace(server, lineage=LINEAGE)
        distance = await asyncio.get_running_loop().run_in_executor(self._admitting, self._admission.admit, known)
        self.serves()
        return distance

    def _settled(self, name: str) -> int | None:
        """The newest version; None while it is on its way to this server."""
        return None if self.is_publishing or name in self.publisher.loading() else self.version

    def _compare(self, server: ServerInfo, answer: Completion) -> GoldenComparison:
        """With another server that holds the newest weights, where one can be asked now."""
        version = self.version
        for other in self.pool.servers():
            is_other = other.name != server.name and other.state is ServerState.READY
            if not is_other or (other.weight_version, answer.weight_version) != (version, version):
                continue
            if (same := self._same_of(other)) is not None and same.weight_version == version:
                return GoldenComparison(version=version, distance=distance_of(answer, same), whom=other.name)
        return GoldenComparison(version=version, distance=None)

    def _same_of(self, other: ServerInfo) -> Completion | None:
        """None where it can't be asked now: that says nothing about the one that is to be admitted. Asked again where
        the trainer has ended it with all requests, or a pause would let any weights in."""
        for _ in range(TRIES):
            try:
                return self._admission.answer(other)
            except ServerError as error:
                if not isinstance(error, RequestFailed) or error.kind != "aborted":
                    break
        return None

    async def close(self) -> None:
        await self.publisher.close()
        await self.pool.close()
        await self.client.close()
        self._admitting.shutdown(wait=False)


def distance_of(one: Completion, other: Completion) -> float:
    """Mean difference of log-probs, up to the first token in which two greedy completions part, which is included: a
    tie may go either way, and then its log-probs are the same."""
    same = 0
    for mine, theirs in zip(one.token_ids, other.token_ids, strict=False):
        if mine != theirs:
            break
        same += 1
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))[: same + 1]
    return fmean(abs(mine - theirs) for mine, theirs in pairs) if pairs else math.inf
