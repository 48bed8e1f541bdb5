"""Decides which node and GPUs each server and trainer rank gets, and what Ray reserves for them. Pure, deterministic.

    settings ─► groups of processes, the largest first ─► the first node with room ─► placements ─► bundles

Shares of a GPU are bookkeeping, Ray's as much as ours, and no limit on memory: what fits in memory is
`launcher/resources/run_plan.py`'s. Names of nodes are the plan's; which machine Ray takes for each is
recorded when the run is placed (`run.placed`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.resources.capacity import RANK, SERVER, FreeCapacity, NoCapacity, NodeResources, ProcessPlacement

ENDLESS = 2**20
ANYWHERE = (NodeResources(name="node 0", gpus=ENDLESS, cpus=math.inf),)
"""For the question what a run needs, before anybody specifies what there is."""

LEAST_CPUS = 0.001
"""CPUs of a bundle whose processes reserve none: Ray allows no empty bundle."""


def place(
    config: RunConfig, *, servers_on: str, trainer_on: str, nodes: Sequence[NodeResources] = ANYWHERE
) -> tuple[ProcessPlacement, ...]:
    """Every process on its node, servers first. `servers_on` and `trainer_on` are `cpu`, or else a GPU.

    The group that reserves most comes first: a server over several GPUs, or all ranks together. Each of its processes
    takes the first node with room (`cluster.placement=PACK`), or the one with the fewest processes (SPREAD); ranks stay
    on one node where one can hold them all, and no two of them share a GPU. Raises ResourceError: what is short, and
    where.
    """
    nodes = nodes or (NodeResources(name="no node", gpus=0, cpus=0),)
    groups = [*_servers(config, servers_on, nodes), _ranks(config, trainer_on)]
    left = [FreeCapacity(number, node) for number, node in enumerate(nodes)]
    placed: dict[str, ProcessPlacement] = {}
    try:
        for group in sorted(groups, key=_booked, reverse=True):
            placed |= {one.name: one for one in _place_group(config, group, left)}
    except NoCapacity as shortage:
        gpus = gpus_needed(config, servers_on=servers_on, trainer_on=trainer_on)
        cpus = sum(one.cpus for group in groups for one in group)
        share = may_share_gpus(config)
        local = config.cluster.address == "local"
        raise shortage.report(
            gpus_booked=gpus, cpus_booked=cpus, nodes=nodes, may_share=share, is_local=local
        ) from shortage
    return tuple(placed[one.name] for group in groups for one in group)


def _servers(config: RunConfig, device: str, nodes: Sequence[NodeResources]) -> list[list[ProcessPlacement]]:
    sglang = config.sglang
    gpus = 0 if device == "cpu" else sglang.tp_size * sglang.dp_size
    return [
        [
            ProcessPlacement(
                name=f"server-{index}",
                kind=SERVER,
                index=index,
                share=sglang.gpu_fraction,
                cpus=sglang.num_cpus,
                n_gpus=gpus,
            )
        ]
        for index in range(sglang.n_servers)
    ]


def _ranks(config: RunConfig, device: str) -> list[ProcessPlacement]:
    actor, gpus = config.actor, 0 if device == "cpu" else 1
    return [
        ProcessPlacement(
            name=rank_name(rank), kind=RANK, index=rank, share=actor.gpu_fraction, cpus=actor.num_cpus, n_gpus=gpus
        )
        for rank in range(actor.dp_size)
    ]


def rank_name(rank: int) -> str:
    """Rank 0 is the trainer that everybody talks to."""
    return "trainer" if rank == 0 else f"trainer-{rank}"


def _booked(group: Sequence[ProcessPlacement]) -> tuple[int, float, float]:
    gpus = sum(one.n_gpus for one in group)
    return gpus, group[0].share if gpus else 0.0, sum(one.cpus for one in group)


def _place_group(
    config: RunConfig, group: Sequence[ProcessPlacement], left: Sequence[FreeCapacity]
) -> Iterator[ProcessPlacement]:
    order = sorted(left, key=lambda node: -node.holds(group[0], len(group))) if group[0].kind == RANK else left
    for one in group:
        open_nodes = list(order)
        if config.cluster.placement == "SPREAD":
            open_nodes.sort(key=lambda node: node.placed)
        for node in open_nodes:
            if (gpus := node.find(one)) is not None:
                yield node.take(one, gpus)
                break
        else:
            raise NoCapacity(one, open_nodes)


def gpus_needed(config: RunConfig, *, servers_on: str = "cuda", trainer_on: str = "cuda") -> int:
    """GPUs that servers and trainer reserve together."""
    return gpus_of(place(config, servers_on=servers_on, trainer_on=trainer_on))


def gpus_of(placements: Sequence[ProcessPlacement]) -> int:
    """Different GPUs that are reserved."""
    return len({(one.node, gpu) for one in placements for gpu in one.gpus})


def may_share_gpus(config: RunConfig) -> bool:
    """Whether a smaller `gpu_fraction` would be accepted: not of a server over several GPUs, nor of processes that
    NCCL is to put into one group, which takes no two ranks on one GPU."""
    return config.sglang.tp_size * config.sglang.dp_size == 1 and config.actor.weight_update_mode != "xccl"


def describe_booking(config: RunConfig) -> str:
    """Which process reserves which share of a GPU, for a message."""
    sglang, actor = config.sglang, config.actor
    servers = f"{sglang.n_servers} server{'s' if sglang.n_servers > 1 else ''}"
    of_one = sglang.tp_size * sglang.dp_size
    each = f"{of_one} GPUs" if of_one > 1 else f"sglang.gpu_fraction={sglang.gpu_fraction:g}"
    ranks = f"{actor.dp_size} ranks of the trainer" if actor.dp_size > 1 else "the trainer"
    booked = [] if sglang.device == "cpu" else [f"{servers} × {each}"]
    booked += [] if actor.device == "cpu" else [f"{ranks} × actor.gpu_fraction={actor.gpu_fraction:g}"]
    return " + ".join(booked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What Ray reserves at once, on one node. `names` are of the processes; `node` is the plan's."""

    names: tuple[str, ...]
    node: int
    gpus: int
    cpus: float

    @property
    def resources(self) -> dict[str, float]:
        """As Ray takes them."""
        amounts = {"GPU": float(self.gpus), "CPU": float(self.cpus)}
        return {kind: amount for kind, amount in amounts.items() if amount > 0} or {"CPU": LEAST_CPUS}


def bundles(placements: Sequence[ProcessPlacement], *, strategy: str) -> tuple[Bundle, ...]:
    """Every process in exactly one bundle.

    Together are: the processes that share a GPU, since Ray gives two halves of one GPU only within one bundle; and with
    PACK the trainer ranks of one node, which talk to each other all the time. Everything else is a bundle of its own,
    so that a server that has lost its node can come up wherever one server fits.
    """
    groups: dict[Hashable, list[ProcessPlacement]] = {}
    for one in placements:
        key: Hashable = one.name
        if one.gpus and one.share < 1:
            key = ("gpu", one.node, one.gpus[0])
        elif one.kind == RANK and strategy == "PACK":
            key = ("ranks", one.node)
        groups.setdefault(key, []).append(one)
    return tuple(
        Bundle(
            names=tuple(one.name for one in group),
            node=group[0].node,
            gpus=len({gpu for one in group for gpu in one.gpus}),
            cpus=sum(one.cpus for one in group),
        )
        for group in groups.values()
    )
