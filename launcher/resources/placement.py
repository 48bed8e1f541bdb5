"""What Ray reserves for a run: bundles of processes that belong on one node. Pure, deterministic.

    settings ─► processes ─► bundles ─► Ray's placement group, which decides the nodes
                                    └─► the plan of the dry run: the first node with room

Shares of a GPU are bookkeeping, Ray's as much as ours, and no limit on memory: what fits in memory is
`launcher/resources/run_plan.py`'s. Nodes and GPU numbers here are the plan's; which ones Ray takes is recorded when the
run is placed (`run.placed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from launcher.base.errors import ResourceError
from launcher.base.wording import counted
from launcher.config.schema import RunConfig

SERVER, RANK = "server", "trainer rank"
ROUNDING = 1e-9
"""Three shares of a third fill one GPU; as floats they are a little more."""
LEAST_CPUS = 0.001
"""CPUs of a bundle whose processes reserve none: Ray allows no empty bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """What one node of the cluster offers."""

    name: str
    gpus: float
    cpus: float


ANYWHERE = (NodeResources(name="node 0", gpus=math.inf, cpus=math.inf),)
"""For the question what a run needs, before anybody specifies what there is."""


def node_name(number: int) -> str:
    """The name of a node that is only described."""
    return f"node {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """One process tree of the run: a server, or a trainer rank, and where the plan has it.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What Ray reserves at once, on one node."""

    processes: tuple[ProcessPlacement, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.processes)

    @property
    def gpus(self) -> int:
        return math.ceil(sum(one.n_gpus * one.share for one in self.processes) - ROUNDING)

    @property
    def cpus(self) -> float:
        return sum(one.cpus for one in self.processes)

    @property
    def resources(self) -> dict[str, float]:
        """As Ray takes them."""
        amounts = {"GPU": float(self.gpus), "CPU": float(self.cpus)}
        return {kind: amount for kind, amount in amounts.items() if amount > 0} or {"CPU": LEAST_CPUS}

    @property
    def roles(self) -> str:
        kinds = Counter(one.kind for one in self.processes)
        return " and ".join(counted(number, kind) for kind, number in kinds.items())


class Placement(NamedTuple):
    """`shortage`: why these nodes don't hold the bundles; those are then placed on a node without limits."""

    bundles: tuple[Bundle, ...]
    shortage: ResourceError | None

    @property
    def processes(self) -> tuple[ProcessPlacement, ...]:
        """Servers first, each kind in order."""
        found = (process for bundle in self.bundles for process in bundle.processes)
        return tuple(sorted(found, key=lambda one: (one.kind != SERVER, one.index)))

    @property
    def gpus(self) -> int:
        """That are reserved in all."""
        return sum(bundle.gpus for bundle in self.bundles)


def place(
    config: RunConfig, *, servers_on: str = "cuda", trainer_on: str = "cuda", nodes: Sequence[NodeResources] = ANYWHERE
) -> Placement:
    """The run's bundles, each on a node of the plan. `servers_on` and `trainer_on` are `cpu`, or else a GPU.

    With cluster.placement=PACK the trainer's ranks, which talk to each other all the time, are one bundle where that
    leaves room for the rest, else one on each node.
    """
    is_spread = config.cluster.placement == "SPREAD"
    processes = _largest_first(config, servers_on, trainer_on)
    together, apart = _bundled(processes, ranks_apart=False), _bundled(processes, ranks_apart=True)
    if not is_spread and (placed := _on_nodes(together, nodes, is_spread=False)) is not None:
        return Placement(placed, None)
    if (placed := _on_nodes(apart, nodes, is_spread=is_spread)) is not None:
        return Placement(placed if is_spread else _with_ranks_joined(placed), None)
    return Placement(_on_nodes(apart, ANYWHERE, is_spread=False) or (), no_room(config, apart, nodes))


def gpus_needed(config: RunConfig) -> int:
    """GPUs that servers and trainer reserve together, where both are on GPUs."""
    return place(config).gpus


def rank_name(rank: int) -> str:
    """Rank 0 is the trainer that everybody talks to."""
    return "trainer" if rank == 0 else f"trainer-{rank}"


def _largest_first(config: RunConfig, servers_on: str, trainer_on: str) -> list[ProcessPlacement]:
    """The group that reserves most comes first: a server over several GPUs, or all ranks."""
    sglang, actor = config.sglang, config.actor
    of_server = 0 if servers_on == "cpu" else sglang.tp_size * sglang.dp_size
    servers = [
        ProcessPlacement(
            name=f"server-{index}",
            kind=SERVER,
            index=index,
            share=sglang.gpu_fraction,
            cpus=sglang.num_cpus,
            n_gpus=of_server,
        )
        for index in range(sglang.n_servers)
    ]
    ranks = [
        ProcessPlacement(
            name=rank_name(rank),
            kind=RANK,
            index=rank,
            share=actor.gpu_fraction,
            cpus=actor.num_cpus,
            n_gpus=0 if trainer_on == "cpu" else 1,
        )
        for rank in range(actor.dp_size)
    ]

    def reserved(group: Sequence[ProcessPlacement]) -> tuple[int, float, float]:
        gpus = sum(one.n_gpus for one in group)
        return gpus, group[0].share if gpus else 0.0, sum(one.cpus for one in group)

    groups = sorted([*([one] for one in servers), ranks], key=reserved, reverse=True)
    return [one for group in groups for one in group]


def _bundled(processes: Sequence[ProcessPlacement], *, ranks_apart: bool) -> tuple[Bundle, ...]:
    """Every process in exactly one bundle: a server has its own, so that one that has lost its node can come up
    wherever a server fits. Processes that share a GPU share a bundle, as Ray gives two halves of one GPU only there."""
    found: list[list[ProcessPlacement]] = []
    for one in processes:
        with_room = (
            bundle
            for bundle in found
            if _share_a_gpu(one, bundle) or (not ranks_apart and _are_whole_ranks([one, *bundle]))
        )
        joined = next(with_room, None)
        if joined is None:
            found.append([one])
        else:
            joined.append(one)
    return tuple(Bundle(processes=tuple(bundle)) for bundle in found)


def _share_a_gpu(one: ProcessPlacement, bundle: Sequence[ProcessPlacement]) -> bool:
    """No two ranks do, however small their shares: NCCL takes no two of one group on one GPU."""
    together = [one, *bundle]
    is_one_gpu = all(process.n_gpus == 1 for process in together)
    has_room = sum(process.share for process in together) <= 1 + ROUNDING
    return is_one_gpu and has_room and sum(process.kind == RANK for process in together) < 2


def _are_whole_ranks(processes: Sequence[ProcessPlacement]) -> bool:
    return all(one.kind == RANK and (one.share == 1 or not one.n_gpus) for one in processes)


def _on_nodes(
    bundles: Sequence[Bundle], nodes: Sequence[NodeResources], *, is_spread: bool
) -> tuple[Bundle, ...] | None:
    """Each bundle on the first node with room, the largest first, or with `is_spread` on the one with the fewest; None
    where one has no room."""
    placed: list[list[Bundle]] = [[] for _ in nodes]
    for bundle in sorted(bundles, key=lambda one: (one.gpus, one.cpus), reverse=True):
        open_nodes = [
            number
            for number, node in enumerate(nodes)
            if sum(one.gpus for one in placed[number]) + bundle.gpus <= node.gpus
            and sum(one.cpus for one in placed[number]) + bundle.cpus <= node.cpus + ROUNDING
        ]
        if not open_nodes:
            return None
        number = min(open_nodes, key=lambda one: len(placed[one])) if is_spread else open_nodes[0]
        first = sum(one.gpus for one in placed[number])
        placed[number].append(Bundle(processes=tuple(_numbered(bundle, number, first))))
    return tuple(bundle for on_node in placed for bundle in on_node)


def _with_ranks_joined(bundles: Sequence[Bundle]) -> tuple[Bundle, ...]:
    """The ranks of a node in one bundle: apart, Ray would mix them with servers, and more of them would talk between
    nodes."""
    joined: dict[Hashable, tuple[ProcessPlacement, ...]] = {}
    for one in bundles:
        key = one.processes[0].node if _are_whole_ranks(one.processes) else one.names
        joined[key] = (*joined.get(key, ()), *one.processes)
    return tuple(Bundle(processes=processes) for processes in joined.values())


def _numbered(bundle: Bundle, node: int, first: int) -> Iterator[ProcessPlacement]:
    for one in bundle.processes:
        yield replace(one, node=node, gpus=tuple(range(first, first + one.n_gpus)))
        first += one.n_gpus if one.share == 1 else 0


# ── what is said where there is no room ──

GPU_KEYS = "sglang.n_servers, sglang.tp_size, sglang.dp_size or actor.dp_size"
CPU_KEYS = "sglang.num_cpus or actor.num_cpus"
SHARE = ", let them share a GPU (sglang.gpu_fraction, actor.gpu_fraction)"
JOIN = "join a cluster with more nodes (cluster.address, cluster.n_nodes)"
ADD_NODES = "add nodes (cluster.n_nodes)"
LARGER_NODES = "take larger nodes"


def no_room(
    config: RunConfig, bundles: Sequence[Bundle], nodes: Sequence[NodeResources], free: Sequence[NodeResources] = ()
) -> ResourceError:
    """What the run asks for, by role, what the nodes have in all, and the settings that ask for less. `free`: what
    others leave of the nodes, where they hold some of it."""
    lower, share, alone, more = CPU_KEYS, "", "", ADD_NODES
    if not are_cpus_short(bundles, free or nodes):
        lower, share = GPU_KEYS, SHARE if may_share_gpus(config) else ""
    if config.cluster.address == "local":
        more = JOIN
    with_a_gpu = [replace(node, gpus=max(node.gpus, 1)) for node in nodes]  # where none has one, size is not lacking
    if nodes and (one := _larger_than_each(bundles, with_a_gpu)) is not None:  # what there is in all may be enough
        alone, more = f"; no node alone has {amounts(one.gpus, one.cpus)} ({one.roles})", LARGER_NODES
        lower, share = " or ".join(_keys_of_size(config, one, with_a_gpu)), ""
    return ResourceError(f"{asked_for(bundles)}{alone}; {there_are(nodes)}", f"lower {lower}{share}, or {more}")


def _larger_than_each(bundles: Sequence[Bundle], nodes: Sequence[NodeResources]) -> Bundle | None:
    """The first that no node holds, be it empty."""
    return next((one for one in bundles if _on_nodes([one], nodes, is_spread=False) is None), None)


def _keys_of_size(config: RunConfig, bundle: Bundle, nodes: Sequence[NodeResources]) -> list[str]:
    """The settings that alone make this bundle smaller. Of GPUs only a server takes more than one."""
    if are_cpus_short([bundle], nodes):
        kinds = {one.kind for one in bundle.processes}
        return [key for kind, key in ((SERVER, "sglang.num_cpus"), (RANK, "actor.num_cpus")) if kind in kinds]
    over = {"sglang.tp_size": config.sglang.tp_size, "sglang.dp_size": config.sglang.dp_size}
    return [key for key, size in over.items() if size > 1]


def are_cpus_short(bundles: Sequence[Bundle], nodes: Sequence[NodeResources]) -> bool:
    """Whether bundles without room on these nodes would have it with CPUs enough; else they lack GPUs."""
    return _on_nodes(bundles, [replace(node, cpus=math.inf) for node in nodes], is_spread=False) is not None


def asked_for(bundles: Sequence[Bundle]) -> str:
    """`17 GPUs and 136 CPUs are asked for: 8 × 1 GPU and 8 CPUs (1 server), 9 GPUs and 72 CPUs (9 trainer ranks)`."""
    alike = Counter((one.gpus, one.cpus, one.roles) for one in bundles)
    parts = [
        f"{f'{count} × ' if count > 1 else ''}{amounts(gpus, cpus)} ({roles})"
        for (gpus, cpus, roles), count in alike.items()
    ]
    together = amounts(sum(one.gpus for one in bundles), sum(one.cpus for one in bundles))
    return f"{together} are asked for: {', '.join(parts)}"


def there_are(nodes: Sequence[NodeResources]) -> str:
    gpus, cpus = sum(one.gpus for one in nodes), sum(one.cpus for one in nodes)
    return f"{counted(len(nodes), 'node')} with {amounts(gpus, cpus)} in all"


def amounts(gpus: float, cpus: float) -> str:
    """Without what has no limit: a local cluster is given as many CPUs as the run reserves."""
    known = [f"{amount:g} {kind}{'s' * (amount != 1)}" for amount, kind in ((gpus, "GPU"), (cpus, "CPU"))]
    return " and ".join(word for word, amount in zip(known, (gpus, cpus), strict=True) if math.isfinite(amount))


def may_share_gpus(config: RunConfig) -> bool:
    """Whether a smaller `gpu_fraction` would be accepted: not of a server over several GPUs, nor of processes that
    NCCL is to put into one group, which takes no two ranks on one GPU."""
    return config.sglang.tp_size * config.sglang.dp_size == 1 and config.actor.weight_update_mode != "xccl"
