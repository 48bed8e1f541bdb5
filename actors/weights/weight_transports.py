"""The ways by which new weights reach a server, behind one interface.

    actor.weight_update_mode   where                                  what is sent
    disk    FolderTransport    on the CPU, and behind the door        the path of a folder in memory
    tensor  TensorTransport    on GPUs that trainer and server share  handles of tensors, without a file
    xccl    GroupTransport     servers on GPUs of their own           a broadcast over a group with each server

The last two give way to folders where a server fails to take them (FallbackTransport).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Set
from typing import TYPE_CHECKING, TypeAlias

from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.messages import PublishedWeights, ServerInfo, ServerKey

if TYPE_CHECKING:
    import torch  # takes seconds, and the driver imports this without a tensor in sight

NamedWeights: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
Send = Callable[[ServerInfo], Awaitable[None]]
"""Sends one version to a server, which confirms it. Raises WeightsRefused, RequestFailed."""

FAST_TRIES = 2
"""Failures in a row of one server, after which weights go through folders."""
AGAIN_AFTER = 20
AGAIN_AT_MOST = 320
"""Publishes through folders before the fast way is tried again: at first, and at most."""
NOBODY_THERE = "refused"


class WeightTransport(ABC):
    """Used on one asyncio loop. `newest`: the newest weights in a folder, from which a server can start; None where
    there are none. `n_failures`: after another one `prepare` may take another way."""

    newest: PublishedWeights | None = None
    n_failures = 0

    @abstractmethod
    async def prepare(self, version: int, lineage: int) -> Send:
        """Make the current weights ready to be sent; afterwards the model may change. Raises WeightsRefused."""

    def keep(self, servers: Collection[ServerKey]) -> None:  # noqa: B027 - most keep nothing for a server
        """End what is kept for others than these incarnations."""

    def published(self, version: int, *, reading: Set[int]) -> None:  # noqa: B027 - most have nothing to remove
        """A version went out. `reading`: versions that some server still reads."""

    def forget_all(self) -> None:
        """After a restore the same version numbers mean other weights."""
        self.newest = None


class TensorTransport(WeightTransport):
    """From this process's memory to servers on its machine, split over `tp_size` GPUs."""

    def __init__(
        self, client: SGLangClient, weights: Callable[[], NamedWeights], *, tp_size: int, timeout_s: float
    ) -> None:
        self._client = client
        self._weights = weights
        self._tp_size = tp_size
        self._timeout_s = timeout_s

    async def prepare(self, version: int, lineage: int) -> Send:
        from actors.serving.weight_buckets import in_buckets  # torch

        buckets = await asyncio.to_thread(lambda: in_buckets(self._weights()))
        return lambda server: self._client.update_weights_from_tensor(
            server.url,
            buckets=buckets,
            weight_version=version,
            timeout_s=self._timeout_s,
            tp_size=self._tp_size,
        )


class FallbackTransport(WeightTransport):
    """`fast`, and `folders` in its place for a while: after two failures in a row of one server, for all.

    After AGAIN_AFTER publishes the fast way is tried again; a failure then takes folders at once, for twice as many.
    """

    def __init__(
        self,
        fast: WeightTransport,
        folders: Callable[[str], WeightTransport],
        *,
        what: str,
        is_living: Callable[[ServerInfo], bool],
        again: Callable[[], object] = lambda: None,
    ) -> None:
        """`folders` is told why they are taken, each time, and raises OSError where they can't be made; `again`: of the
        first success of the fast way afterwards. `what`: the fast way, for people. `is_living`: of the incarnation that
        failed to take weights.
        """
        self._fast = fast
        self._new_folders = folders
        self._folders: WeightTransport | None = None
        self._what = what
        self._is_living = is_living
        self._again = again
        self._in_a_row: dict[str, int] = {}
        self._by_folders = False
        self._is_trial = False
        self._wait = self._left = AGAIN_AFTER

    async def prepare(self, version: int, lineage: int) -> Send:
        if self._by_folders and self._folders is not None:
            send = await self._folders.prepare(version, lineage)
            self.newest = self._folders.newest
            return send
        self.newest = None  # a server would start from older weights
        fast = await self._fast.prepare(version, lineage)
        return lambda server: self._send(server, fast)

    async def _send(self, server: ServerInfo, fast: Send) -> None:
        try:
            await fast(server)
        except (WeightsRefused, RequestFailed) as error:
            if self._is_living(server) and getattr(error, "kind", "") != NOBODY_THERE:
                self._failed(server.name, error.message)
            raise
        self._took(server.name)

    def _failed(self, server: str, reason: str) -> None:
        if self._by_folders:  # what was sent before says nothing of folders
            return
        self._in_a_row[server] = self._in_a_row.get(server, 0) + 1
        if self._in_a_row[server] >= (1 if self._is_trial else FAST_TRIES):
            self._take_folders(f"{server} failed to take {self._what}: {reason}")
        self.n_failures += 1  # not where there are no folders: a publish would be begun again and again

    def _take_folders(self, reason: str) -> None:
        try:
            self._folders = self._new_folders(reason)
        except OSError as error:
            raise WeightsRefused(f"{reason}; and folders can't be made: {error}") from error
        self._in_a_row.clear()
        self._by_folders = True
        self._left = self._wait
        self._wait = min(2 * self._wait, AGAIN_AT_MOST)

    def _took(self, server: str) -> None:
        self._in_a_row.pop(server, None)
        was_trial = self._is_trial and not self._by_folders
        self._is_trial = False
        if was_trial:
            self._wait = AGAIN_AFTER
            self._again()

    def keep(self, servers: Collection[ServerKey]) -> None:
        self._fast.keep(servers)

    def published(self, version: int, *, reading: Set[int]) -> None:
        if self._folders is not None:
            self._folders.published(version, reading=reading)
        if self._by_folders:
            self._left -= 1
            if self._left == 0:
                self._by_folders = False
                self._is_trial = True

    def forget_all(self) -> None:
        super().forget_all()
        if self._folders is not None:
            self._folders.forget_all()
