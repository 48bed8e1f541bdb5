"""New weights to every server, each confirming the version before it gets traffic (P3).

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
from collections.abc import Mapping
from dataclasses import dataclass

from actors.rollout.server_pool import OVER, ServerPool
from actors.weights.weight_transports import Send, WeightTransport
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import PublishedWeights, ServerInfo, ServerKey, ServerState

PATIENCE_S = 1.0
"""The others are waited for at least so long, and at least as long again as the first one took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One version, ready to be sent; `lineage`: how many restores lie behind it."""

    version: int
    lineage: int
    send: Send


class WeightPublisher:
    """Publishes to the servers of a pool, and reports to the pool what each one confirmed. Runs on the pool's loop.

    `lineage`: how many restores lie behind the weights.
    """

    def __init__(
        self,
        pool: ServerPool,
        transport: WeightTransport,
        *,
        lineage: int = 0,
        finish_s: float | None = None,
    ) -> None:
        """`finish_s`: for so long requests in flight at a server that is to load may finish; then they move on, so that
        none is answered by two versions. None: there are none, since nothing is made ahead.
        """
        self._pool = pool
        self._transport = transport
        self._finish_s = finish_s
        self.lineage = lineage
        self._version: int | None = None
        self._update: WeightUpdate | None = None  # while a server loads it: tensors take memory
        self._loading: dict[ServerKey, asyncio.Task[bool]] = {}
        self._reading: list[int] = []  # versions whose folders some server reads
        self._late: set[ServerKey] = set()
        self._exporting = asyncio.Lock()
        self._one_at_a_time: defaultdict[ServerKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def newest(self) -> PublishedWeights | None:
        """The newest weights in a folder."""
        return self._transport.newest

    @property
    def version(self) -> int | None:
        """The newest that was published since the last restore; None: none was."""
        return self._version

    def loading(self) -> tuple[str, ...]:
        """Servers that are being sent weights now, those that no step waits for too. May be called on any thread."""
        return tuple(sorted({name for name, _ in filter(self.is_loading, tuple(self._loading))}))

    def is_loading(self, key: ServerKey) -> bool:
        """Whether this incarnation is being sent weights now; no longer, once it has confirmed them."""
        task = self._loading.get(key)
        return task is not None and not task.done()

    async def begin(self, lineage: int) -> None:
        """From now on the weights are those after the `lineage`-th restore; earlier folders are invalid."""
        self.lineage = self._pool.lineage = lineage
        self._version = self._update = None
        await self._cancel_loading()
        self._transport.forget_all()

    async def close(self) -> None:
        """Cancel what is still loading, and end what is kept for servers."""
        await self._cancel_loading()
        self._transport.keep(())

    async def _cancel_loading(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self, version: int) -> None:
        """Send the current weights as `version` to all servers; returns when those that keep up have them.

        Raises WeightsRefused where no server took them; a single one that did not is STALE.
        """
        failures, took_them = -1, False
        while not took_them and failures != self._transport.n_failures:  # again, and at last through folders
            failures = self._transport.n_failures
            took_them = await self._offer(version)
        self._transport.published(version, reading=frozenset(self._reading))
        if not took_them:
            raise WeightsRefused(
                f"no server took weight version {version}: "
                + "; ".join(f"{server.name}: {server.reason}" for server in self._pool.servers()),
                "see llm_server-<i>.log; actor.weight_update_timeout is each server's deadline",
            )

    async def _offer(self, version: int) -> bool:
        """Whether any server took it."""
        servers = [server for server in self._pool.servers() if server.state not in OVER]
        self._transport.keep([server.key for server in servers])
        send = await self.prepare(version)
        self._version = version
        self._update = WeightUpdate(version=version, lineage=self.lineage, send=send)
        fresh = {self._begin_loading(server): server for server in servers if not self.is_loading(server.key)}
        took_them = await self._wait_for(fresh)
        self._forget_what_nobody_loads()
        return took_them

    def _forget_what_nobody_loads(self) -> None:
        if not self._loading:
            self._update = None

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

    async def _bring_up_to_date(self, server: ServerInfo) -> bool:
        """Send the newest weights until none newer appear meanwhile. Returns whether the server holds the newest."""
        key = server.key
        while (update := self._update) is not None:
            async with self._one_at_a_time[key]:
                was_delivered = await self._deliver(server, update)
            if not was_delivered:
                self._late.add(key)
                return False
            if update is self._update:
                self._late.discard(key)
                return True
        return False

    async def _deliver(self, server: ServerInfo, update: WeightUpdate) -> bool:
        if not self._pool.is_living(server):
            return False
        await self._pool.mark_stale(server.key, f"loading weight version {update.version}")
        if self._finish_s is not None:
            await self._pool.clear(server.name, within_s=self._finish_s)
        try:
            await self._send(server, update.send, update.version)
        except ServerError as error:
            await self._pool.mark_stale(server.key, error.message)
            return False
        await self._pool.confirm(server.key, update.version, update.lineage)
        return True

    async def prepare(self, version: int) -> Send:
        """Make the current weights ready to be sent as `version`; afterwards the model may change.

        It must not change until this returns. It is read in a thread, for one caller at a time: that takes seconds, and
        the loop must answer meanwhile. Raises WeightsRefused.
        """
        async with self._exporting:
            return await self._transport.prepare(version, self.lineage)

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
