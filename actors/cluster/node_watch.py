"""Watches which nodes of the cluster are alive, and which of the run's actors can't be scheduled, twice a second.

Ray declares a node lost after its own health check (settings: actors/cluster/ray_cluster.py), and starts its actors
elsewhere as soon as a node has room. Until then such an actor runs nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import ray._private.state as ray_state

from actors.cluster.node_identity import OF_RAY
from actors.processes.background_tasks import BackgroundTasks

LOOK_S = 0.5
HOMELESS_S = 5.0
"""Without a process for so long, it waits for a node: a restart on one takes one or two seconds. Whether an autoscaler,
a batch system or a person brings one is not known here, so nobody is told that there is none."""

log = logging.getLogger("nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """`address`: as the cluster knows it."""

    id: str
    address: str
    is_alive: bool
    reason: str = ""


def nodes_now() -> dict[str, ClusterNode]:
    """All that the cluster has, or had."""
    return {
        node["NodeID"]: ClusterNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            is_alive=node["Alive"],
            reason=str(node.get("DeathReasonMessage") or ""),
        )
        for node in OF_RAY.nodes()
    }


def has_process(actor: Any) -> bool:
    """Whether some node runs this actor now, or is just starting it."""
    known = ray_state.actors(actor._actor_id.hex())  # noqa: SLF001
    return bool(known.get("Pid")) and known.get("State") != "RESTARTING"


class NodeWatch:
    """`lost` and `joined` are called once for a node. `actors`: the run's, by name. On one loop.

    `known`: nodes that were alive at the last look, of an earlier Coordinator perhaps that was lost with one of them.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        *,
        lost: Callable[[ClusterNode], None],
        joined: Callable[[ClusterNode], None],
        known: Set[str] = frozenset(),
        look: Callable[[], Mapping[str, ClusterNode]] = nodes_now,
        has_place: Callable[[Any], bool] = has_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._lost = lost
        self._joined = joined
        self._look_at_nodes = look
        self._has_place = has_place
        self._clock = clock
        self._nodes: dict[str, ClusterNode] = {}
        self._alive = set(known)
        self._nowhere_since: dict[str, float] = {}
        self._is_blind = False
        self._tasks = BackgroundTasks()

    def unschedulable_since(self, name: str) -> float | None:
        """Since when Ray has found no node for this actor; None where it runs, or is only being started."""
        self._tasks.check()
        since = self._nowhere_since.get(name)
        return since if since is not None and self._clock() - since >= HOMELESS_S else None

    def begin_looking(self) -> None:
        self._tasks.start(self._look_on())

    async def observe_nodes(self) -> None:
        """Ask the store once, which may take long; without an answer, nothing changes."""
        try:
            found, placed = await asyncio.to_thread(self._ask)
        except Exception as error:  # noqa: BLE001 - Ray's own errors are many, and bare
            if not self._is_blind:
                log.warning("nodes.not_known reason=%r", error)
            self._is_blind = True
            return
        self._is_blind = False
        self._nodes = dict(found)
        before = self._alive
        self._alive = {node.id for node in found.values() if node.is_alive}
        for node in found.values():
            if node.is_alive and node.id not in before:
                self._joined(node)
            elif not node.is_alive and node.id in before:
                self._lost(node)
        now = self._clock()
        self._nowhere_since = {
            name: self._nowhere_since.get(name, now) for name, is_placed in placed.items() if not is_placed
        }

    def _ask(self) -> tuple[Mapping[str, ClusterNode], dict[str, bool]]:
        found = self._look_at_nodes()
        several = len(found) > 1
        return found, {name: self._has_place(actor) for name, actor in list(self._actors.items())} if several else {}

    async def _look_on(self) -> None:
        while True:
            await self.observe_nodes()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self._tasks.close()
