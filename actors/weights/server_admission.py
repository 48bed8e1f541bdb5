"""Gives a server traffic once its log-probs show that it holds the trainer's weights (P3), whoever the trainer is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

from actors.rollout.server_pool import Probe, ServerPool
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from actors.weights.weight_consistency_check import ONE_TOKEN, GoldenComparison, golden_distance, golden_limit
from launcher.base.errors import ServerError
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig

Call = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs it on the loop of the pool, and waits for it on another thread."""


def token_probe(client: SGLangClient, prompt: Sequence[int], *, within_s: float) -> Probe:
    """The probe of a pool: one token of `prompt`."""

    async def weight_version_at(url: str) -> int | None:
        try:
            answer = await client.generate(url, token_ids=prompt, sampling=ONE_TOKEN, timeout_s=within_s)
        except RequestFailed:
            return None
        return answer.weight_version

    return weight_version_at


class ServerAdmission:
    """Used on any thread but that of the pool's loop."""

    def __init__(
        self,
        client: SGLangClient,
        pool: ServerPool,
        config: RunConfig,
        *,
        call: Call,
        prompt: Sequence[int],
        sampling: Sampling,
        compare: Callable[[ServerInfo, Completion], GoldenComparison],
        settled: Callable[[str], int | None],
        unchanged: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`compare`: with whatever the trainer has; `settled`: its version, None while new weights are on their way to
        the server of that name. `unchanged`: while it is held no version is published."""
        self._client = client
        self._pool = pool
        self._config = config
        self._call = call
        self._prompt = prompt
        self._sampling = sampling
        self._compare = compare
        self._settled = settled
        self._unchanged = unchanged or contextlib.nullcontext()

    def admit(self, server: ServerInfo) -> float | None:
        """Give a server traffic if it holds the trainer's weights; returns the distance of its log-probs in nats, None
        where nobody could be compared with.

        Raises WeightsRefused and RequestFailed (it stays STALE, without a version), ServerError where it has ended.
        """
        if not self._pool.is_living(server):  # whoever orders this has seen it alive
            self._call(self._pool.update([dataclasses.replace(server, state=ServerState.STALE)]))
        try:
            distance = golden_distance(
                lambda: self.answer(server),
                lambda answer: self._compare(server, answer),
                limit=golden_limit(self._config),
                name=server.name,
                settled=lambda: self._settled(server.name),
                within_s=self._config.rollout.request_timeout,
            )
        except ServerError as error:
            doubted = dataclasses.replace(server, state=ServerState.STALE, weight_version=None, reason=error.message)
            with contextlib.suppress(ServerError):  # one that has ended stays what it is
                self._call(self._pool.update_if_alive(doubted))
            raise
        with self._unchanged:  # no step may be published between this look and the admission
            known = dataclasses.replace(self._known(server), state=ServerState.READY, reason="")
            self._call(self._pool.update_if_alive(known))
        return distance

    def answer(self, server: ServerInfo) -> Completion:
        """To the golden prompt. Raises RequestFailed, ServerError where it ends first."""
        asked = self._client.generate(
            server.url,
            token_ids=self._prompt,
            sampling=self._sampling,
            timeout_s=self._config.rollout.request_timeout,
        )
        answer: Completion = self._call(self._pool.unless_ended(server, asked))
        return answer

    def _known(self, server: ServerInfo) -> ServerInfo:
        """As the pool knows this incarnation: it may have taken newer weights meanwhile."""
        lives = {known.key: known for known in self._pool.servers()}
        return lives.get(server.key, server)
