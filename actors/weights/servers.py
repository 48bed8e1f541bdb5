"""The servers behind a trainer: which of them may answer, and whether they hold the trainer's weights (P3).

    weights are sent ─► the server confirms their version ─► its log-probs are those of the trainer's weights ─► READY

Behind the launcher's own trainer (actors/training/training_servers.py) and the door of another project's
(actors/foreign/door_servers.py) alike. They differ in where the weights come from, and in whose log-probs a server's
are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from actors.weights.weight_consistency_check import ONE_TOKEN, GoldenComparison, golden_distance, golden_limit
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.errors import ServerError
from launcher.base.messages import ServerInfo, ServerKey, ServerState
from launcher.base.rollouts import Completion
from launcher.base.wording import in_one_line
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys

LONGEST_REASON = 300
"""Characters: an error of torch may be a page."""

log = logging.getLogger("servers")


class Servers(ABC):
    """Used on one asyncio loop. `publisher` is made by the class that knows where the weights come from."""

    publisher: WeightPublisher

    def __init__(self, config: RunConfig, keys: ServerKeys, *, prompt: Sequence[int], sampling: Sampling) -> None:
        """`prompt`, `sampling`: of the completions that are compared."""
        self.config = config
        self.client = SGLangClient(keys)
        self.pool = ServerPool(self._weight_version_at)
        self.is_publishing = False
        self._prompt = prompt
        self._sampling = sampling

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the trainer's weights."""

    @property
    def usual_distance(self) -> float | None:
        """Between the log-probs of servers and trainer with the same weights, in nats; None where that is not known."""
        return None

    @abstractmethod
    async def compare(self, server: ServerInfo, answer: Completion) -> GoldenComparison:
        """The server's answer to the golden prompt with whatever the trainer has."""

    async def _weight_version_at(self, url: str) -> int | None:
        """The probe of the pool: one token."""
        within_s = self.config.health.silence_max_s
        try:
            answer = await self.client.generate(url, token_ids=self._prompt, sampling=ONE_TOKEN, timeout_s=within_s)
        except RequestFailed:
            return None
        return answer.weight_version

    async def publish(self, version: int) -> None:
        """As of WeightPublisher. Until it ends the servers count as being sent weights."""
        self.is_publishing = True
        try:
            await self.publisher.publish(version)
        finally:
            self.is_publishing = False

    def settled(self, key: ServerKey) -> int | None:
        """The trainer's version; None while new weights are on their way to this incarnation."""
        return None if self.is_publishing or self.publisher.is_loading(key) else self.version

    async def admit(self, server: ServerInfo) -> float | None:
        """Give a server traffic if it holds the trainer's weights; returns the distance of its log-probs in nats, None
        where nobody could be compared with.

        Raises WeightsRefused and RequestFailed (it stays STALE, without a version), ServerError where it has ended, and
        what kept it from being compared.
        """
        if not self.pool.is_living(server):  # whoever orders this has seen it alive
            await self.pool.update([dataclasses.replace(server, state=ServerState.STALE)])
        limit = golden_limit(self.config, self.usual_distance)
        try:
            distance = await golden_distance(
                lambda: self.answer(server),
                lambda answer: self.compare(server, answer),
                limit=limit,
                name=server.name,
                settled=lambda: self.settled(server.key),
                within_s=self.config.rollout.request_timeout,
            )
        except Exception as error:  # whatever it is: one that kept its version would be asked again for ever
            doubted = dataclasses.replace(server, state=ServerState.STALE, weight_version=None, reason=why_not(error))
            with contextlib.suppress(ServerError):  # one that has ended stays what it is
                await self.pool.update_if_alive(doubted)
            raise
        await self.pool.admit(server, is_loading=self.publisher.is_loading(server.key))
        log.info("server.admitted name=%s distance=%s limit=%.3g", server.name, distance, limit)
        return distance

    async def answer(self, server: ServerInfo) -> Completion:
        """To the golden prompt. Raises RequestFailed, ServerError where it ends first."""
        asked = self.client.generate(
            server.url,
            token_ids=self._prompt,
            sampling=self._sampling,
            timeout_s=self.config.rollout.request_timeout,
        )
        return await self.pool.unless_ended(server, asked)

    async def close(self) -> None:
        await self.publisher.close()
        await self.pool.close()
        await self.client.close()


def why_not(error: Exception) -> str:
    """Why a server was not admitted."""
    if isinstance(error, ServerError):
        return error.message
    return in_one_line(f"it could not be compared: {type(error).__name__}: {error}", longest=LONGEST_REASON)
