"""Who runs where: the seats of servers and trainer ranks on the GPUs and CPUs of nodes. Pure, and the same each time.

    settings ─► groups of seats, the largest first ─► the first node with room ─► seats ─► bundles
    (launcher/resources/bundles.py)

A seat is one process tree of the run: a server, the part of a server that one node holds, a trainer rank. Shares of a
GPU are bookkeeping, Ray's as much as ours, and no limit on memory: what fits in memory is
`launcher/resources/run_plan.py`'s. Names of nodes are the plan's; which machine Ray takes for each is told when the run
is placed (`run.placed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launcher.base.errors import ResourceError
from launcher.config.schema import RunConfig
from launcher.resources.capacity import RANK, SERVER, FreeCapacity, NoCapacity, NodeResources, ProcessPlacement, say

ENDLESS = 2**20
ANYWHERE = (NodeResources(name="node 0", gpus=ENDLESS, cpus=math.inf),)
"""For the question what a run needs, before anybody says what there is."""


def place(
    config: RunConfig, *, servers_on: str, trainer_on: str, nodes: Sequence[NodeResources] = ANYWHERE
) -> tuple[ProcessPlacement, ...]:
    """Every seat on its node, servers first. `servers_on` and `trainer_on` are `cpu`, or else a GPU.

    The group that books most comes first: a server over several GPUs, or all ranks together. Each of its seats takes
    the first node with room (`cluster.placement=PACK`), or the one with the fewest seats (SPREAD); ranks stay on one
    node where one can hold them all, and no two of them share a GPU. Raises ResourceError: what is short, and where.
    """
    nodes = nodes or (NodeResources(name="no node", gpus=0, cpus=0),)
    groups = [*_servers(config, servers_on, nodes), _ranks(config, trainer_on)]
    rooms = [FreeCapacity(number, node) for number, node in enumerate(nodes)]
    placed: dict[str, ProcessPlacement] = {}
    try:
        for group in sorted(groups, key=_booked, reverse=True):
            placed |= {seat.name: seat for seat in _place_group(config, group, rooms)}
    except NoCapacity as no_room:
        gpus = gpus_needed(config, servers_on=servers_on, trainer_on=trainer_on)
        cpus = sum(seat.cpus for group in groups for seat in group)
        raise say(no_room, gpus_booked=gpus, cpus_booked=cpus, nodes=nodes) from no_room
    return tuple(placed[seat.name] for group in groups for seat in group)


def _servers(config: RunConfig, device: str, nodes: Sequence[NodeResources]) -> list[list[ProcessPlacement]]:
    sglang = config.sglang
    gpus = 0 if device == "cpu" else sglang.tp_size * sglang.dp_size
    over = nodes_of_a_server(gpus, max(node.gpus for node in nodes), sglang.tp_size)
    if over > 1 and sglang.dp_size > 1:
        raise ResourceError(
            f"a server of sglang.tp_size={sglang.tp_size} × sglang.dp_size={sglang.dp_size} GPUs needs {over} nodes, "
            "and SGLang has data-parallel copies on one node only",
            "set sglang.dp_size=1 and raise sglang.n_servers instead",
        )
    return [
        [
            ProcessPlacement(
                name=f"server-{index}" if node_rank == 0 else f"server-{index}.{node_rank}",
                kind=SERVER,
                index=index,
                share=sglang.gpu_fraction,
                cpus=sglang.num_cpus,
                n_gpus=gpus // over,
                node_rank=node_rank,
                n_nodes=over,
            )
            for node_rank in range(over)
        ]
        for index in range(sglang.n_servers)
    ]


def nodes_of_a_server(gpus: int, per_node: int, tp_size: int) -> int:
    """The fewest nodes that hold `gpus` in equal parts, which is how SGLang divides its ranks; 1 where none can."""
    if gpus == 0 or per_node == 0:
        return 1
    return next((n for n in range(1, tp_size + 1) if tp_size % n == 0 and gpus // n <= per_node), 1)


def _ranks(config: RunConfig, device: str) -> list[ProcessPlacement]:
    actor = config.actor
    return [
        ProcessPlacement(
            name=rank_name(rank),
            kind=RANK,
            index=rank,
            share=actor.gpu_fraction,
            cpus=actor.num_cpus,
            n_gpus=0 if device == "cpu" else 1,
        )
        for rank in range(actor.dp_size)
    ]


def rank_name(rank: int) -> str:
    """Rank 0 is the trainer that everybody talks to."""
    return "trainer" if rank == 0 else f"trainer-{rank}"


def _booked(group: Sequence[ProcessPlacement]) -> tuple[int, float, float]:
    gpus = sum(seat.n_gpus for seat in group)
    return gpus, group[0].share if gpus else 0.0, sum(seat.cpus for seat in group)


def _place_group(
    config: RunConfig, group: Sequence[ProcessPlacement], rooms: Sequence[FreeCapacity]
) -> Iterator[ProcessPlacement]:
    spread = config.cluster.placement == "SPREAD"
    order = sorted(rooms, key=lambda room: -room.holds(group[0], len(group))) if group[0].kind == RANK else rooms
    taken: set[int] = set()
    for seat in group:
        elsewhere = [room for room in order if seat.n_nodes == 1 or room.number not in taken]
        if spread:
            elsewhere.sort(key=lambda room: room.seats)
        for room in elsewhere:
            if (gpus := room.find(seat)) is not None:
                taken.add(room.number)
                yield room.take(seat, gpus)
                break
        else:
            raise NoCapacity(seat, elsewhere or rooms)


def gpus_needed(config: RunConfig, *, servers_on: str = "cuda", trainer_on: str = "cuda") -> int:
    """GPUs that servers and trainer book together."""
    return gpus_of(place(config, servers_on=servers_on, trainer_on=trainer_on))


def gpus_of(seats: Sequence[ProcessPlacement]) -> int:
    """Different GPUs that are booked."""
    return len({(seat.node, gpu) for seat in seats for gpu in seat.gpus})


def describe_booking(config: RunConfig) -> str:
    """Who books which share of a GPU, for a message."""
    sglang, actor = config.sglang, config.actor
    servers = f"{sglang.n_servers} server{'s' if sglang.n_servers > 1 else ''}"
    of_one = sglang.tp_size * sglang.dp_size
    each = f"{of_one} GPUs" if of_one > 1 else f"sglang.gpu_fraction={sglang.gpu_fraction:g}"
    ranks = f"{actor.dp_size} ranks of the trainer" if actor.dp_size > 1 else "the trainer"
    booked = [] if sglang.device == "cpu" else [f"{servers} × {each}"]
    booked += [] if actor.device == "cpu" else [f"{ranks} × actor.gpu_fraction={actor.gpu_fraction:g}"]
    return " + ".join(booked)
