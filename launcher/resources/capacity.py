"""Tracks the free GPUs and CPUs of nodes while processes are placed, and reports what is short. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from launcher.base.errors import ResourceError

ROUNDING = 1e-9  # three shares of a third fill one GPU
SERVER, RANK = "server", "rank"
NAMED_NODES = 4
"""In a message; of a large cluster the rest is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """What one node of the cluster offers."""

    name: str
    gpus: int
    cpus: float


def node_name(number: int) -> str:
    """The name of a node that is only described."""
    return f"node {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """Where one process tree of the run is: a server, or a trainer rank.

    `gpus` are numbers on its node, empty on the CPU, and `share` is of each of them. `index` is the server's, or the
    rank.
    """

    name: str
    kind: str
    index: int
    share: float
    cpus: float
    n_gpus: int
    gpus: tuple[int, ...] = ()
    node: int = 0


class FreeCapacity:
    """What is left of one node."""

    def __init__(self, number: int, node: NodeResources) -> None:
        self.number = number
        self.node = node
        self.cpus = node.cpus
        self.placed = 0
        self._used: dict[int, float] = {}
        self._of_ranks: set[int] = set()

    def find(self, wanted: ProcessPlacement) -> tuple[int, ...] | None:
        """The first GPUs with room; None where it does not fit."""
        if wanted.cpus > self.cpus + ROUNDING:
            return None
        found = tuple(islice(self._open_to(wanted), wanted.n_gpus))
        return found if len(found) == wanted.n_gpus else None

    def holds(self, wanted: ProcessPlacement, at_most: int) -> int:
        """How many like `wanted` fit."""
        by_cpus = at_most if wanted.cpus == 0 else int(min(self.cpus / wanted.cpus + ROUNDING, at_most))
        if wanted.n_gpus == 0:
            return by_cpus
        return min(by_cpus, len(tuple(islice(self._open_to(wanted), at_most * wanted.n_gpus))) // wanted.n_gpus)

    def take(self, wanted: ProcessPlacement, gpus: tuple[int, ...]) -> ProcessPlacement:
        for gpu in gpus:
            self._used[gpu] = self._used.get(gpu, 0.0) + wanted.share
        if wanted.kind == RANK:
            self._of_ranks |= set(gpus)
        self.cpus -= wanted.cpus
        self.placed += 1
        return replace(wanted, node=self.number, gpus=gpus)

    def free_gpus(self, wanted: ProcessPlacement) -> int:
        return sum(1 for _ in self._open_to(wanted))

    def _open_to(self, wanted: ProcessPlacement) -> Iterator[int]:
        """GPUs with room for its share; no two ranks share one."""
        barred = self._of_ranks if wanted.kind == RANK else ()
        for gpu in range(self.node.gpus):
            if gpu not in barred and self._used.get(gpu, 0.0) + wanted.share <= 1 + ROUNDING:
                yield gpu


class NoCapacity(Exception):
    """No node has room for `wanted`, beside those that were placed before it. `left`: what the nodes have left."""

    def __init__(self, wanted: ProcessPlacement, left: Sequence[FreeCapacity]) -> None:
        super().__init__(wanted.name)
        self.wanted = wanted
        self.left = left

    def report(
        self,
        *,
        gpus_booked: int,
        cpus_booked: float,
        nodes: Sequence[NodeResources],
        may_share: bool,
        is_local: bool,
    ) -> ResourceError:
        """Which resource is short, by how much, on which node, and what to change. `…_booked`: by the complete run.
        `may_share`: GPUs. `is_local`: the cluster is the run's own, on one node."""
        wanted = self.wanted
        with_gpus = [node for node in self.left if node.free_gpus(wanted) >= wanted.n_gpus]
        if with_gpus:
            kind, needed, booked, there = "CPU", wanted.cpus, cpus_booked, sum(node.cpus for node in nodes)
            what = f"{_amount(needed, kind)} on one node{' with its GPUs' * bool(wanted.n_gpus)}"
            free = [(node.cpus, node) for node in with_gpus]
        else:
            kind, needed, booked, there = "GPU", wanted.n_gpus, gpus_booked, sum(node.gpus for node in nodes)
            what = _wanted_gpus(wanted)
            free = [(node.free_gpus(wanted), node) for node in self.left]
        most, roomiest = max(free, key=lambda one: one[0])
        left = [_left(amount, node.node, wanted, kind) for amount, node in free[:NAMED_NODES]]
        if len(free) > NAMED_NODES:
            left.append(f"{len(free) - NAMED_NODES} more nodes have no more than that")
        which = f"{roomiest.node.name}{', which has the most' if len(free) > 1 else ''}"
        return ResourceError(
            f"{kind}s: {booked:g} are needed and {there:g} found; {wanted.name} needs {what}: {', '.join(left)}: "
            f"{_amount(needed - most, kind)} short on {which}",
            f"lower {LOWER[wanted.kind, kind]}{SHARE if kind == 'GPU' and may_share else ''}, or "
            f"{JOIN if is_local else ADD_NODES}",
        )


LOWER = {
    (SERVER, "GPU"): "sglang.n_servers, sglang.tp_size or sglang.dp_size",
    (RANK, "GPU"): "actor.dp_size",
    (SERVER, "CPU"): "sglang.num_cpus or sglang.n_servers",
    (RANK, "CPU"): "actor.num_cpus or actor.dp_size",
}
SHARE = ", let them share a GPU (sglang.gpu_fraction, actor.gpu_fraction)"
JOIN = "join a cluster with more nodes (cluster.address, cluster.n_nodes)"
ADD_NODES = "add nodes (cluster.n_nodes)"


def _left(amount: float, node: NodeResources, wanted: ProcessPlacement, kind: str) -> str:
    if kind == "CPU":
        return f"{node.name} has {amount:g} of {node.cpus:g} CPUs free"
    room = "free" if wanted.share == 1 else f"with room for a share of {wanted.share:g}"
    return f"{node.name} has {amount:g} of {node.gpus} GPUs {room}"


def _wanted_gpus(wanted: ProcessPlacement) -> str:
    if wanted.share < 1:
        return f"a share of {wanted.share:g} of one GPU{' without another rank' if wanted.kind == RANK else ''}"
    on_one = " on one node" if wanted.n_gpus > 1 else ""
    return f"{_amount(wanted.n_gpus, 'GPU')}{on_one}"


def _amount(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
