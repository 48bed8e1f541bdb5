"""New weights to every server, each confirming the version before it gets traffic (P3).

`disk`: a Hugging Face folder in memory-backed storage, written once and loaded by every server; a restarted server
starts from it too. `tensor`: over HTTP to servers on this node, without a file. `xccl`: over a group with each server.
After two failures in a row of one server these two give way to files, for a while (weight_way.py).

All servers load side by side, each with its own deadline, and each gets traffic as soon as it has confirmed. The step
continues when the first has confirmed and the others have had about as long again. A server that is late then loads
beside the step: it is STALE until it confirms, and is sent the newest version next if there is a newer one. A server
that was late or refused is not waited for again until it has kept up. One without traffic (restarted, silent)
is never waited for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from actors.rollout.server_pool import OVER, ServerPool
from actors.serving.sglang_client import SGLangClient
from actors.weights.weight_folders import WeightFolders
from actors.weights.weight_way import WeightWay
from launcher.base.errors import RequestFailed, ServerError, WeightsRefused
from launcher.base.messages import PublishedWeights, ServerInfo, ServerKey, ServerState

if TYPE_CHECKING:
    import torch  # takes seconds, and the driver imports this without a tensor in sight

    from actors.weights.group_sender import GroupSender

PATIENCE_S = 1.0
"""The others are waited for at least so long, and at least as long again as the first one took."""

NOBODY_THERE = "refused"

NamedWeights: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
Send = Callable[[ServerInfo], Awaitable[None]]
"""Sends one version to a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    """One version, ready to be sent; `lineage`: how many restores lie behind it."""

    version: int
    lineage: int
    send: Send


class WeightPublisher:
    """Publishes to the servers of a pool, and reports to the pool what each one confirmed. Runs on the pool's loop.

    `newest`: the newest weights in a folder. `lineage`: how many restores lie behind the weights.
    """

    def __init__(
        self,
        client: SGLangClient,
        pool: ServerPool,
        *,
        folders: WeightFolders | None,
        weights: Callable[[], NamedWeights],
        tp_size: int,
        timeout_s: float,
        files: Callable[[str], WeightFolders] | None = None,
        again: Callable[[], object] = lambda: None,
        groups: GroupSender | None = None,
        finish_s: float | None = None,
    ) -> None:
        """`folders` None: `weights` are sent, over `groups` or, without, as tensors to servers split over `tp_size`
        GPUs. `files` makes the folders that take their place, and is told why; `again`: they are taken again.

        `finish_s`: for so long requests in flight at a server that is to load may finish; then they move on, so that
        none is answered by two versions. None: there are none, since nothing is made ahead.
        """
        self._client = client
        self._pool = pool
        self._folders = folders
        self._weights = weights
        self._files = files
        self._again = again
        self._groups = groups
        self._way = WeightWay(by_files=folders is not None, may_change=files is not None and folders is None)
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._finish_s = finish_s
        self.lineage = 0
        self.newest: PublishedWeights | None = None
        self._version: int | None = None
        self._parcel: _Parcel | None = None  # while a server loads it: tensors take memory
        self._loading: dict[ServerKey, asyncio.Task[bool]] = {}
        self._reading: list[int] = []  # versions whose folders some server reads
        self._late: set[ServerKey] = set()
        self._exporting = asyncio.Lock()
        self._one_at_a_time: defaultdict[ServerKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def version(self) -> int | None:
        """The newest that was published since the last restore; None: none was."""
        return self._version

    def loading(self) -> tuple[str, ...]:
        """Servers that are being sent weights now, those that no step waits for too. May be called on any thread."""
        return tuple(sorted({name for name, _ in tuple(self._loading)}))

    async def begin(self, lineage: int) -> None:
        """From now on the weights are those after the `lineage`-th restore; earlier folders are invalid."""
        self.lineage, self.newest, self._version, self._parcel = lineage, None, None, None
        self._pool.lineage = lineage
        await self.close()
        if self._folders is not None:
            self._folders.forget_all()

    async def close(self) -> None:
        """Cancel what is still loading."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self, version: int) -> None:
        """Send the current weights as `version` to all servers; returns when those that keep up have them.

        Raises WeightsRefused where no server took them; a single one that did not is STALE.
        """
        failures, took_them = -1, False
        while not took_them and failures != self._way.n_failures:  # again, and at last through files
            failures = self._way.n_failures
            took_them = await self._offer(version)
        self._way.published()
        if self._folders is not None:
            self._folders.forget_before(version, spare=frozenset(self._reading))
        if not took_them:
            raise WeightsRefused(
                f"no server took weight version {version}: "
                + "; ".join(f"{server.name}: {server.reason}" for server in self._pool.servers()),
                "see llm_server-<i>.log; actor.weight_update_timeout is each server's deadline",
            )

    async def _offer(self, version: int) -> bool:
        """Whether any server took it."""
        servers = [server for server in self._pool.servers() if server.state not in OVER]
        if self._groups is not None:
            self._groups.keep([server.key for server in servers])
        send = await self.prepare(version)
        self._version, self._parcel = version, _Parcel(version=version, lineage=self.lineage, send=send)
        fresh = {self._begin_loading(server): server for server in servers if not self._is_loading(server.key)}
        took_them = await self._wait_for(fresh)
        self._forget_what_nobody_loads()
        return took_them

    def _forget_what_nobody_loads(self) -> None:
        if not self._loading:
            self._parcel = None

    async def _wait_for(self, fresh: Mapping[asyncio.Task[bool], ServerInfo]) -> bool:
        """Until the first has taken them and the others had their time, or all have ended. Returns whether any did."""
        started, give_up_at = time.monotonic(), float("inf")
        waiting = set(self._loading.values())
        took_them = False
        while waiting:
            awaited = {task for task in waiting if task in fresh and self._is_awaited(fresh[task])}
            if took_them and (not awaited or time.monotonic() >= give_up_at):
                break
            left_s = max(0.0, give_up_at - time.monotonic()) if took_them else None
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done if not task.cancelled()) and not took_them:
                took_them = True
                now = time.monotonic()
                give_up_at = now + max(PATIENCE_S, now - started)
        self._late |= {fresh[task].key for task in waiting if task in fresh}
        return took_them

    def _is_awaited(self, server: ServerInfo) -> bool:
        return server.state is ServerState.READY and server.key not in self._late

    def _begin_loading(self, server: ServerInfo) -> asyncio.Task[bool]:
        key = server.key
        task = self._loading[key] = asyncio.create_task(self._bring_up_to_date(server))
        task.add_done_callback(functools.partial(self._ended, key))
        return task

    def _ended(self, key: ServerKey, task: asyncio.Task[bool]) -> None:
        if self._loading.get(key) is task:
            del self._loading[key]
            self._forget_what_nobody_loads()

    def _is_loading(self, key: ServerKey) -> bool:
        return key in self._loading and not self._loading[key].done()

    async def _bring_up_to_date(self, server: ServerInfo) -> bool:
        """Send the newest weights until none newer appear meanwhile. Returns whether the server holds the newest."""
        key = server.key
        while (parcel := self._parcel) is not None:
            async with self._one_at_a_time[key]:
                was_delivered = await self._deliver(server, parcel)
            if not was_delivered:
                self._late.add(key)
                return False
            if parcel is self._parcel:
                self._late.discard(key)
                return True
        return False

    async def _deliver(self, server: ServerInfo, parcel: _Parcel) -> bool:
        if not self._pool.is_living(server):
            return False
        await self._pool.mark_stale(server.key, f"loading weight version {parcel.version}")
        if self._finish_s is not None:
            await self._pool.clear(server.name, within_s=self._finish_s)
        try:
            await self._send(server, parcel.send, parcel.version)
        except ServerError as error:
            await self._pool.mark_stale(server.key, error.message)
            return False
        await self._pool.confirm(server.key, parcel.version, parcel.lineage)
        return True

    async def prepare(self, version: int) -> Send:
        """Make the current weights ready to be sent as `version`; afterwards the model may change.

        It must not change until this returns. It is read in a thread, for one caller at a time: that takes seconds, and
        the loop must answer meanwhile. Raises WeightsRefused.
        """
        async with self._exporting:
            if self._folders is not None and self._way.by_files:
                folder = await asyncio.to_thread(self._folders.have, version)
                self.newest = PublishedWeights(path=str(folder), version=version, lineage=self.lineage)
                return lambda server: self._client.update_weights_from_disk(
                    server.url, path=folder, weight_version=version, timeout_s=self._timeout_s
                )
            self.newest = None
            from actors.serving.weight_buckets import in_buckets  # torch

            groups = self._groups
            device = None if groups is None else groups.device
            buckets = await asyncio.to_thread(lambda: in_buckets(self._weights(), device=device))
            if groups is not None:
                return lambda server: self._send_fast(server, groups.send(server, buckets, version))
            return lambda server: self._send_fast(
                server,
                self._client.update_weights_from_tensor(
                    server.url,
                    buckets=buckets,
                    weight_version=version,
                    timeout_s=self._timeout_s,
                    tp_size=self._tp_size,
                ),
            )

    async def send_to(self, server: ServerInfo, send: Send, version: int) -> int:
        """Send prepared weights to one server, which gets no traffic until it is admitted; returns the version that it
        has: a newer one, where a publish was first.

        Raises ServerError: WeightsRefused, RequestFailed, or that it has ended.
        """
        lineage = self.lineage
        async with self._one_at_a_time[server.key]:
            for known in self._pool.servers():
                held = known.weight_version if (known.key, known.lineage) == (server.key, lineage) else None
                if held is not None and held > version:
                    return held
            await self._pool.update([dataclasses.replace(server, state=ServerState.STALE, reason="loading weights")])
            await self._send(server, send, version)
            await self._pool.confirm(server.key, version, lineage)
        self._late.discard(server.key)
        return version

    async def _send(self, server: ServerInfo, send: Send, version: int) -> None:
        """The folder of `version` stays until the server has answered, however many steps are taken meanwhile."""
        self._reading.append(version)
        try:
            await self._pool.unless_ended(server, send(server))
        finally:
            self._reading.remove(version)

    async def _send_fast(self, server: ServerInfo, sending: Awaitable[None]) -> None:
        try:
            await sending
        except (WeightsRefused, RequestFailed) as error:
            if self._pool.is_living(server) and getattr(error, "kind", "") != NOBODY_THERE:
                self._count_failure(server.name, error.message)
            raise
        if self._way.took(server.name):
            self._again()

    def _count_failure(self, name: str, reason: str) -> None:
        if self._way.failed(name) and self._files is not None:
            tried = "tensors" if self._groups is None else "weights over its group"
            self._folders = self._files(f"{name} failed to take {tried}: {reason}")
