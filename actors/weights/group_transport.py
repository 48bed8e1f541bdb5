"""Weights over a torch.distributed group with each server: formed at its first update, and again after each failure.

A group for each server, not one for all: in one, a server that hangs holds the others' schedulers up as long as it
likes, as they pass the weights on to each other, and SGLang gives its side of a group no deadline. A group belongs to
one incarnation of a server. What goes wrong, on either side, ends it within the server's deadline, and touches no other
server's.

gloo on a CPU, NCCL on GPUs (not run). Made as SGLang makes its side (`init_custom_process_group`): the prefixes of the
store must be the same. What blocks is done on a thread of its own, which nobody needs to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from actors.serving.group_address import LOOPBACK, interface_with
from actors.serving.sglang_client import SGLangClient
from actors.serving.weight_buckets import WeightBucket, in_buckets
from actors.weights.weight_transports import NamedWeights, Send, WeightTransport
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.messages import ServerInfo, ServerKey

POLL_S = 0.001
FOR_EVER = timedelta(days=1)
"""NCCL's watchdog would end this process at a group's own deadline; ours aborts the group before."""
_numbers = itertools.count()

Result = TypeVar("Result")


class GroupTransport(WeightTransport):
    """`device`: of all, cpu or cuda; `address`: of this node, where servers come to. On one asyncio loop. Of two
    updates of a server at once the second waits: who takes part in a broadcast isn't told which it is."""

    def __init__(
        self,
        client: SGLangClient,
        weights: Callable[[], NamedWeights],
        *,
        device: str,
        tp_size: int,
        timeout_s: float,
        address: str = LOOPBACK,
    ) -> None:
        self._client = client
        self._weights = weights
        self._address = address
        self._device = device
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._groups: dict[ServerKey, UpdateGroup] = {}
        self._turns: dict[ServerKey, asyncio.Lock] = {}

    async def prepare(self, version: int, lineage: int) -> Send:
        buckets = await asyncio.to_thread(lambda: in_buckets(self._weights(), device=self._device))
        return lambda server: self.send(server, buckets, version)

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
        group = UpdateGroup(address=self._address, tp_size=self._tp_size, device=self._device, within_s=_left(deadline))
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


class UpdateGroup:
    """Rank 0 of `1 + tp_size`. `port` of `address`, which is this node's, has the store until all have joined."""

    def __init__(self, *, address: str, tp_size: int, device: str, within_s: float) -> None:
        self.name = f"weights-{os.getpid()}-{next(_numbers)}"
        self.backend = "cuda:nccl" if device == "cuda" else "cpu:gloo"
        self._address = address
        self._device = device
        self._size = 1 + tp_size
        self._within = timedelta(seconds=within_s)
        self._group: Any = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self.port = int(listener.getsockname()[1])
        self._store: Store | None = TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=self._within,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # its own would listen on every interface, for anybody
        )

    async def join(self) -> None:
        """Until the server has joined too. Raises RuntimeError where it has not, within the time."""
        await _in_a_thread(self._join)

    def _join(self) -> None:
        assert self._store is not None, "joined once"
        device = self.backend.partition(":")[0]
        store: Store = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        if self._device == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build

            if self._address != LOOPBACK and (interface := interface_with(self._address)) is not None:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # its own choice may be one that nobody reaches
            of_nccl = ProcessGroupNCCL.Options()
            of_nccl._timeout = FOR_EVER  # noqa: SLF001
            self._group = ProcessGroupNCCL(store, 0, self._size, of_nccl)
            return
        gloo: Any = ProcessGroupGloo
        of_gloo = gloo._Options()  # noqa: SLF001
        of_gloo._devices = [gloo.create_device(hostname=self._address)]  # noqa: SLF001
        of_gloo._timeout = self._within  # noqa: SLF001
        self._group = gloo(store, 0, self._size, of_gloo)
        self._store = None  # nobody asks it again, and it would go on listening

    async def broadcast(self, flat: torch.Tensor, *, within_s: float) -> None:
        """Until the server's ranks have it. Raises RuntimeError where the group broke, or not all had it in time."""
        await _in_a_thread(functools.partial(self._broadcast, flat, timedelta(seconds=within_s)))

    def _broadcast(self, flat: torch.Tensor, within: timedelta) -> None:
        group = self._group  # kept by this thread until the broadcast is over: to destroy it before would wait for that
        if group is None:
            raise RuntimeError("it was given up")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        options.timeout = within
        work = group.broadcast([flat], options)
        while not work.is_completed():
            time.sleep(POLL_S)
        work.wait()

    def abort(self) -> None:
        """It is of no more use. Does not wait.

        gloo ends what is under way at its deadline, on the thread that began it: its own abort waits for that too, and
        holds Python's lock meanwhile. NCCL has no deadline of ours, and is aborted.
        """
        group = self._group
        self._group = None
        self._store = None
        if group is not None and self._device == "cuda":
            threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()


def _in_a_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """On a daemon thread: one that is stuck holds up neither the next nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not done.cancelled():
            settled()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            told = functools.partial(done.set_exception, error)
        else:
            told = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, told)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return done
