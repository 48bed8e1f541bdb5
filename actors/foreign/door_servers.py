"""The servers behind the door of another project's trainer: which may answer, and which weights they hold.

The weights are those that the trainer gave last, as folders. A server is compared with another one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from actors.foreign.kept_weights import LINEAGE, KeptWeights
from actors.serving.sglang_client import RequestFailed
from actors.weights.servers import Servers
from actors.weights.weight_consistency_check import GREEDY, TRIES, GoldenComparison
from actors.weights.weight_folders import FolderTransport
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


class DoorServers(Servers):
    """Used on one asyncio loop. `waits_for`: why new weights are not loaded yet; "" where nothing is wrong."""

    def __init__(self, config: RunConfig, keys: ServerKeys, kept: KeptWeights) -> None:
        super().__init__(config, keys, prompt=PROMPT, sampling=GOLDEN)
        self._kept = kept
        if kept.state.paused:
            self.pool.pause()
        timeout_s = config.actor.weight_update_timeout
        folders = FolderTransport(self.client, kept.folders, timeout_s=timeout_s, newest=kept.newest)
        self.publisher = WeightPublisher(self.pool, folders, lineage=LINEAGE)
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
                version = await self._take_weights(source)
                try:
                    await self.publish(version)
                except WeightsRefused as error:  # by every server: the Coordinator restarts or loads them
                    self.waits_for = error.message
            await self.pool.until_served(self.newest)
            self.waits_for = ""
            await self.serves()

    async def _take_weights(self, source: Path) -> int:
        """A disk that refuses the files is waited for: an error would end the trainer.

        The servers count as being sent a version before it counts, else they would seem to hold wrong weights."""
        while True:
            self.is_publishing = True
            try:
                version = await asyncio.to_thread(self._kept.take_weights, source)
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

    async def serves(self) -> None:
        """A server has answered once: the door counts as healthy from now on."""
        if not self._kept.state.serves:
            await self._kept.note_in_turn(serves=True)

    # ── what the Coordinator orders; as of the trainer ──

    async def send_weights(self, server: ServerInfo) -> int:
        """Raises WeightsRefused where none were given yet, RequestFailed."""
        version = self.version
        if self._kept.newest is None:
            raise WeightsRefused("the trainer has given no weights yet: a server starts from sglang.model_path")
        return await self.publisher.send_to(server, await self.publisher.prepare(version), version)

    async def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        await self.pool.update(dataclasses.replace(server, lineage=LINEAGE) for server in servers)

    async def admit(self, server: ServerInfo) -> float | None:
        distance = await super().admit(dataclasses.replace(server, lineage=LINEAGE))
        await self.serves()
        return distance

    async def compare(self, server: ServerInfo, answer: Completion) -> GoldenComparison:
        """With another server that holds the newest weights, whichever answers first: one that hangs is not waited for
        where there is a third."""
        version, ready = self.version, ServerState.READY
        others = [one for one in self.pool.servers() if one.name != server.name and one.state is ready]
        asked = [
            asyncio.ensure_future(self._same_of(other))
            for other in others
            if (other.weight_version, answer.weight_version) == (version, version)
        ]
        try:
            for answering in asyncio.as_completed(asked):
                other, same = await answering
                if same is not None and same.weight_version == version:
                    return GoldenComparison(version=version, distance=distance_of(answer, same), whom=other.name)
            return GoldenComparison(version=version, distance=None)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _same_of(self, other: ServerInfo) -> tuple[ServerInfo, Completion | None]:
        """None where it can't be asked now: that says nothing about the one that is to be admitted. Asked again where
        the trainer has ended it with all requests, or a pause would let any weights in."""
        for _ in range(TRIES):
            try:
                return other, await self.answer(other)
            except ServerError as error:
                if not isinstance(error, RequestFailed) or error.kind != "aborted":
                    break
        return other, None


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
