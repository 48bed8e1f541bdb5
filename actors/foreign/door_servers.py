"""The servers behind the door of another project's trainer: which may answer, and which weights they hold.

In the place of `actors/training/training_servers.py`: the weights are those that the trainer gave last, as folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from pathlib import Path
from statistics import fmean

from actors.foreign.kept_weights import LINEAGE, KeptWeights
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import RequestFailed, SGLangClient
from actors.weights.weight_consistency_check import GREEDY, ONE_TOKEN, golden_limit
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys

PROMPT = tuple(range(1, 17))
"""The first tokens of any vocabulary: what they mean does not matter to a comparison."""
GOLDEN = dataclasses.replace(GREEDY, seed=0)
GOLDEN_TRIES = 5
AGAIN_S = 2.0


class DoorServers:
    """Used on one asyncio loop. `waits_for`: why new weights are not loaded yet; "" where nothing is wrong."""

    def __init__(self, config: RunConfig, keys: ServerKeys, kept: KeptWeights) -> None:
        self._config = config
        self._kept = kept
        self.client = SGLangClient(keys)
        self.pool = ServerPool(self._weight_version_at)
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

    async def admit(self, server: ServerInfo) -> float | None:
        """Give a server traffic. Its log-probs are compared with those of another that holds the same
        version; returns their distance in nats, None where there is no other. Raises WeightsRefused, RequestFailed,
        ServerError where it has ended."""
        if not self.pool.is_living(server):  # whoever orders this has seen it alive
            await self.pool.update([dataclasses.replace(server, state=ServerState.STALE)])
        other = next(
            (
                one
                for one in self.pool.servers()
                if one.name != server.name and one.state is ServerState.READY and one.weight_version == self.version
            ),
            None,
        )
        distance = None
        try:
            answer = await self._golden(server)
            if answer.weight_version != self.version:
                raise WeightsRefused(f"{server.name} answers with version {answer.weight_version}, not {self.version}")
            if other is not None and (same := await self._same_of(other)) is not None:
                distance = distance_of(answer, same)
                if not distance <= golden_limit(self._config):
                    far = f"its log-probs are {distance:.2g} from those of {other.name}"
                    raise WeightsRefused(f"{server.name} says weight version {answer.weight_version}, but {far}")
        except ServerError as error:
            doubted = dataclasses.replace(server, state=ServerState.STALE, weight_version=None, reason=error.message)
            with contextlib.suppress(ServerError):  # one that has ended stays what it is
                await self.pool.update_if_alive(doubted)
            raise
        if answer.weight_version != self.version:
            raise WeightsRefused(f"{server.name}: newer weights came meanwhile")
        held = dataclasses.replace(server, weight_version=self.version, lineage=LINEAGE)
        await self.pool.update_if_alive(dataclasses.replace(held, state=ServerState.READY, reason=""))
        self.serves()
        return distance

    async def _golden(self, server: ServerInfo) -> Completion:
        """Asked again where it was aborted: the trainer's pause and new weights do that, and it tells nothing."""
        tries_left = GOLDEN_TRIES
        while True:
            tries_left -= 1
            asked = self.client.generate(
                server.url, token_ids=PROMPT, sampling=GOLDEN, timeout_s=self._config.rollout.request_timeout
            )
            try:
                return await self.pool.unless_ended(server, asked)
            except RequestFailed as failure:
                if failure.kind != "aborted" or not tries_left:
                    raise

    async def _same_of(self, other: ServerInfo) -> Completion | None:
        """None where it can't be asked now: that says nothing about the one that is to be admitted."""
        try:
            answer = await self._golden(other)
        except ServerError:
            return None
        return answer if answer.weight_version == self.version else None

    async def _weight_version_at(self, url: str) -> int | None:
        within_s = self._config.health.silence_max_s
        try:
            answer = await self.client.generate(url, token_ids=PROMPT, sampling=ONE_TOKEN, timeout_s=within_s)
        except RequestFailed:
            return None
        return answer.weight_version

    async def close(self) -> None:
        await self.publisher.close()
        await self.pool.close()
        await self.client.close()


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
