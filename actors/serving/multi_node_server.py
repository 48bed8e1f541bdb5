"""One incarnation of a server over several nodes: the first node's part serves requests, the others compute.

    launch ─► the worker nodes start their parts ─► this node's part starts ─► they meet ─► it serves for all
    a part ends, on whichever node ─► the server has ended ─► every other part is ended

Without one part the others would wait in a collective operation for ever. To the rest of the run this is a
`ServerIncarnation` like any other: one URL, one exit. It has not been run on GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from ray.exceptions import RayError
from ray.util import get_node_ip_address

from actors.serving.server_host import ServerHost
from actors.serving.server_incarnation import LaunchOrder, ServerIncarnation, ServerSpec
from actors.serving.sglang_command import NodeSpan, meeting_address
from launcher.base.errors import LauncherError
from launcher.base.messages import ServerExit

END_WITHIN_S = 20.0
"""For the parts on other nodes. One that can't be reached is ended by its next start, or by the run's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNodes:
    """The actors of the further nodes, in the order of their node ranks from 1 on; `address` is this node's."""

    actors: Sequence[Any]
    address: str

    @classmethod
    def of(cls, actors: Sequence[Any]) -> Self | None:
        """None for a server on one node."""
        address = str(get_node_ip_address()) if actors else ""  # type: ignore[no-untyped-call]
        return cls(actors=actors, address=address) if actors else None

    async def stop(self) -> None:
        """Stop all that can be reached. Harmless where nothing runs."""
        told = [asyncio.ensure_future(_quietly(actor)) for actor in self.actors]
        if told:
            await asyncio.wait(told, timeout=END_WITHIN_S)


async def _quietly(actor: Any) -> None:
    try:
        await actor.stop.remote()
    except (RayError, LauncherError):  # with its actor or its node, its part is gone
        return


class MultiNodeServer(ServerIncarnation):
    """`launch_over` makes it."""

    _workers: WorkerNodes
    _ended: asyncio.Task[ServerExit]

    @classmethod
    async def launch_over(
        cls, workers: WorkerNodes, spec: ServerSpec, owners: Sequence[int], order: LaunchOrder, host: ServerHost
    ) -> ServerIncarnation:
        """Start all parts side by side; each waits for the others. Raises as `ServerIncarnation.launch`."""
        span = NodeSpan(n_nodes=1 + len(workers.actors), node_rank=0, address=meeting_address(workers.address))
        parts = [
            asyncio.ensure_future(
                _part(actor, f"{spec.name}.{rank}", config=spec.config, span=replace(span, node_rank=rank), order=order)
            )
            for rank, actor in enumerate(workers.actors, start=1)
        ]
        try:
            server = await cls.launch(replace(spec, span=span), owners, order, host)
        except BaseException:
            for part in parts:
                part.cancel()
            await workers.stop()
            raise
        assert isinstance(server, cls)
        server._workers = workers
        server._ended = asyncio.create_task(server._first_end(parts))
        return server

    async def wait_exit(self) -> ServerExit:
        return await asyncio.shield(self._ended)

    async def end(self) -> None:
        await asyncio.gather(super().end(), self._workers.stop())

    async def _first_end(self, parts: Sequence[asyncio.Task[PartEnd]]) -> ServerExit:
        own = asyncio.create_task(super().wait_exit())
        done, _ = await asyncio.wait([own, *parts], return_when=asyncio.FIRST_COMPLETED)
        first = None if own in done else next(part.result() for part in parts if part in done)
        for part in parts:
            part.cancel()
        await self.end()
        ended = await own
        return ended if first is None else replace(ended, reason=first.reason, exit_code=None, was_told=first.was_told)


class PartEnd(NamedTuple):
    """Why a part ended or could not be started."""

    reason: str
    was_told: bool = False


async def _part(actor: Any, name: str, **how: Any) -> PartEnd:
    """Start a part and wait for its end."""
    try:
        await actor.start.remote(**how)
        end: ServerExit = await actor.wait_exit.remote()
    except LauncherError as error:
        return PartEnd(f"{name} did not start: {error.message}")
    except RayError as error:
        return PartEnd(f"{name} is gone with its actor or its node: {type(error).__name__}")
    return PartEnd(f"{name} ended: {end.reason}", end.was_told)
