"""A torch.distributed group of this process and one server's ranks, over which weights are broadcast to that server.

A group for each server, not one for all: in one, a server that hangs holds the others' schedulers up as long as it
likes, as they pass the weights on to each other, and SGLang gives its side of a group no deadline.

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
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from actors.serving.group_address import LOOPBACK, interface_with

POLL_S = 0.001
FOR_EVER = timedelta(days=1)
"""NCCL's watchdog would end this process at a group's own deadline; ours aborts the group before."""
_numbers = itertools.count()

Result = TypeVar("Result")


class UpdateGroup:
    """Rank 0 of `1 + tp_size`. `port` of `address`, which is this node's, has the store until all have joined."""

    def __init__(self, *, address: str, tp_size: int, device: str, within_s: float) -> None:
        self.name = f"weights-{os.getpid()}-{next(_numbers)}"
        self.backend = "cuda:nccl" if device == "cuda" else "cpu:gloo"
        self._address = address
        self._device, self._size, self._within = device, 1 + tp_size, timedelta(seconds=within_s)
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
        options.rootRank, options.rootTensor, options.asyncOp, options.timeout = 0, 0, True, within
        work = group.broadcast([flat], options)
        while not work.is_completed():
            time.sleep(POLL_S)
        work.wait()

    def abort(self) -> None:
        """It is of no more use. Does not wait.

        gloo ends what is under way at its deadline, on the thread that began it: its own abort waits for that too, and
        holds Python's lock meanwhile. NCCL has no deadline of ours, and is aborted.
        """
        group, self._group, self._store = self._group, None, None
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
