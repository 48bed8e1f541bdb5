"""What is left of the nodes while seats are placed, and what is said where a seat finds no room. Pure."""

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
    """One machine of the cluster, as far as it can be booked."""

    name: str
    gpus: int
    cpus: float


def node_name(number: int) -> str:
    """Of a node that is only described."""
    return f"node {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """One process tree of the run: a server, the part of a server that one node holds, or a trainer rank.

    `gpus` are numbers on its node, empty on the CPU, and `share` is of each of them. `index` is the server's, or the
    rank. A server over several nodes has a seat on each, and `node_rank` counts them.
    """

    name: str
    kind: str
    index: int
    share: float
    cpus: float
    n_gpus: int
    gpus: tuple[int, ...] = ()
    node: int = 0
    node_rank: int = 0
    n_nodes: int = 1


class FreeCapacity:
    """What is left of one node."""

    def __init__(self, number: int, node: NodeResources) -> None:
        self.number = number
        self.node = node
        self.cpus = node.cpus
        self.seats = 0
        self._used: dict[int, float] = {}
        self._of_ranks: set[int] = set()

    def find(self, seat: ProcessPlacement) -> tuple[int, ...] | None:
        """GPUs for `seat`, the first ones with room; None where it does not fit."""
        if seat.cpus > self.cpus + ROUNDING:
            return None
        found = tuple(islice(self._open_to(seat), seat.n_gpus))
        return found if len(found) == seat.n_gpus else None

    def holds(self, seat: ProcessPlacement, at_most: int) -> int:
        """How many like `seat` fit."""
        by_cpus = at_most if seat.cpus == 0 else int(min(self.cpus / seat.cpus + ROUNDING, at_most))
        if seat.n_gpus == 0:
            return by_cpus
        return min(by_cpus, len(tuple(islice(self._open_to(seat), at_most * seat.n_gpus))) // seat.n_gpus)

    def take(self, seat: ProcessPlacement, gpus: tuple[int, ...]) -> ProcessPlacement:
        for gpu in gpus:
            self._used[gpu] = self._used.get(gpu, 0.0) + seat.share
        if seat.kind == RANK:
            self._of_ranks |= set(gpus)
        self.cpus -= seat.cpus
        self.seats += 1
        return replace(seat, node=self.number, gpus=gpus)

    def free_gpus(self, seat: ProcessPlacement) -> int:
        return sum(1 for _ in self._open_to(seat))

    def left(self, seat: ProcessPlacement, *, by_gpu: bool) -> str:
        if not by_gpu:
            return f"{self.node.name} has {self.cpus:g} of {self.node.cpus:g} CPUs free"
        room = "free" if seat.share == 1 else f"with room for a share of {seat.share:g}"
        return f"{self.node.name} has {self.free_gpus(seat)} of {self.node.gpus} GPUs {room}"

    def _open_to(self, seat: ProcessPlacement) -> Iterator[int]:
        barred = self._of_ranks if seat.kind == RANK else ()
        for gpu in range(self.node.gpus):
            if gpu not in barred and self._used.get(gpu, 0.0) + seat.share <= 1 + ROUNDING:
                yield gpu


class NoCapacity(Exception):
    """No node has room for this seat, beside those that were placed before it."""

    def __init__(self, seat: ProcessPlacement, rooms: Sequence[FreeCapacity]) -> None:
        super().__init__(seat.name)
        self.seat = seat
        self.rooms = rooms


def say(no_room: NoCapacity, *, gpus_booked: int, cpus_booked: float, nodes: Sequence[NodeResources]) -> ResourceError:
    """Which resource is short, by how much, on which node, and what to change. `…_booked`: by the whole run."""
    seat = no_room.seat
    with_gpus = [room for room in no_room.rooms if room.free_gpus(seat) >= seat.n_gpus]
    by_gpu = not with_gpus
    rooms = no_room.rooms if by_gpu else with_gpus
    free = [room.free_gpus(seat) if by_gpu else room.cpus for room in rooms]
    most = max(range(len(rooms)), key=lambda number: free[number])
    missing = (seat.n_gpus if by_gpu else seat.cpus) - free[most]
    kind = "GPU" if by_gpu else "CPU"
    short = (
        f"{_amount(missing, kind)} short on {rooms[most].node.name}{', which has the most' if len(rooms) > 1 else ''}"
    )
    left = [room.left(seat, by_gpu=by_gpu) for room in rooms[:NAMED_NODES]]
    if len(rooms) > NAMED_NODES:
        left.append(f"{len(rooms) - NAMED_NODES} more nodes have no more than that")
    booked, there = (gpus_booked, sum(node.gpus for node in nodes)) if by_gpu else (cpus_booked, _cpus(nodes))
    what = _asked(seat) if by_gpu else f"{_amount(seat.cpus, kind)} on one node{' with its GPUs' * bool(seat.n_gpus)}"
    return ResourceError(
        f"{kind}s: {booked:g} are booked and {there:g} found; {seat.name} needs {what}: {', '.join(left)}: {short}",
        _hint(seat, by_gpu=by_gpu),
    )


def _cpus(nodes: Sequence[NodeResources]) -> float:
    return sum(node.cpus for node in nodes)


def _asked(seat: ProcessPlacement) -> str:
    part = f" (part {seat.node_rank + 1} of {seat.n_nodes}, each on a node of its own)" if seat.n_nodes > 1 else ""
    alone = " without another rank" if seat.kind == RANK else ""
    if seat.share < 1:
        return f"a share of {seat.share:g} of one GPU{alone}"
    return f"{_amount(seat.n_gpus, 'GPU')}{' on one node' if seat.n_gpus > 1 else ''}{part}"


def _hint(seat: ProcessPlacement, *, by_gpu: bool) -> str:
    more = "or add nodes (cluster.n_nodes)"
    match seat.kind, by_gpu:
        case "server", True:
            return (
                "lower sglang.n_servers, sglang.tp_size or sglang.dp_size, let them share a GPU (sglang.gpu_fraction, "
                f"actor.gpu_fraction), {more}"
            )
        case "rank", True:
            return f"lower actor.dp_size, let it share GPUs (actor.gpu_fraction, sglang.gpu_fraction), {more}"
        case "server", False:
            return f"lower sglang.num_cpus or sglang.n_servers, {more}"
    return f"lower actor.num_cpus or actor.dp_size, {more}"


def _amount(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
