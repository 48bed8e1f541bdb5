"""Weights over a group to each server (update_group.py): formed at its first update, and again after each failure.

A group belongs to one incarnation of a server. What goes wrong, on either side, ends it within the server's deadline,
and touches no other server's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Sequence

from actors.serving.group_address import LOOPBACK
from actors.serving.sglang_client import SGLangClient
from actors.serving.weight_buckets import WeightBucket
from actors.weights.update_group import UpdateGroup
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.messages import ServerInfo, ServerKey


class GroupSender:
    """`device`: of all, cpu or cuda; `address`: of this node, where servers come to. On one asyncio loop. Of two
    updates of a server at once the second waits: who takes part in a broadcast isn't told which it is."""

    def __init__(
        self, client: SGLangClient, *, device: str, tp_size: int, timeout_s: float, address: str = LOOPBACK
    ) -> None:
        self._client = client
        self._address = address
        self.device = device
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._groups: dict[ServerKey, UpdateGroup] = {}
        self._turns: dict[ServerKey, asyncio.Lock] = {}

    async def send(self, server: ServerInfo, buckets: Sequence[WeightBucket], weight_version: int) -> None:
        """Raises WeightsRefused where the server said no or the group broke, RequestFailed where it did not answer in
        time. Then, and where it is cancelled, the group is ended, and the server may hold a part of the weights."""
        key = server.key
        what = f"{server.url} and weight version {weight_version}"
        try:
            async with asyncio.timeout(self._timeout_s), self._turns.setdefault(key, asyncio.Lock()):
                try:
                    await self._send(server, buckets, weight_version, time.monotonic() + self._timeout_s)
                except BaseException:
                    self._end(key)
                    raise
        except TimeoutError as error:
            raise RequestFailed(f"{what}: not taken within {self._timeout_s:g} s", kind="timeout") from error
        except RuntimeError as error:
            raise WeightsRefused(f"{what}: the group broke: {str(error).splitlines()[0]}") from error

    async def _send(
        self, server: ServerInfo, buckets: Sequence[WeightBucket], weight_version: int, deadline: float
    ) -> None:
        group = self._groups.get(server.key) or await self._form(server, deadline)
        for bucket in buckets:
            order = self._client.update_weights_from_distributed(
                server.url,
                group=group.name,
                bucket=bucket,
                weight_version=weight_version if bucket is buckets[-1] else None,
                timeout_s=_left(deadline),
            )
            await _both(order, group.broadcast(bucket.flat, within_s=_left(deadline)))

    async def _form(self, server: ServerInfo, deadline: float) -> UpdateGroup:
        group = UpdateGroup(address=self._address, tp_size=self._tp_size, device=self.device, within_s=_left(deadline))
        self._groups[server.key] = group
        joined = self._client.join_update_group(
            server.url,
            name=group.name,
            address=self._address,
            port=group.port,
            backend=group.backend,
            tp_size=self._tp_size,
            timeout_s=_left(deadline),
        )
        await _both(joined, group.join())
        return group

    def keep(self, servers: Collection[ServerKey]) -> None:
        """End the groups of all others: they are gone, or another incarnation is there."""
        for key in self._turns.keys() - set(servers):
            self._end(key)
            del self._turns[key]

    def _end(self, key: ServerKey) -> None:
        if (group := self._groups.pop(key, None)) is not None:
            group.abort()


async def _both(order: Awaitable[None], broadcast: Awaitable[None]) -> None:
    """Until both are done; the first that fails ends the other."""
    tasks = [asyncio.ensure_future(order), asyncio.ensure_future(broadcast)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1.0)
