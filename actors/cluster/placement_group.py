"""Reserves the run's resources: one placement group for all its actors, and each actor's options for its bundle.

One group rather than one for each actor: several that are rescheduled at once after a node's loss could each hold what
another waits for. An actor that Ray restarts returns to its own bundle; a bundle whose node is lost moves to another
node as soon as one has room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.node_identity import alive_nodes
from launcher.base.errors import ResourceError
from launcher.config.schema import RunConfig
from launcher.resources.capacity import RANK, SERVER, NodeResources, ProcessPlacement
from launcher.resources.placement import Bundle, bundles, place, rank_name

POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlacement:
    """The reserved bundles: each is on a node, and stays this run's until its driver ends."""

    placements: tuple[ProcessPlacement, ...]
    bundles: tuple[Bundle, ...]
    group: PlacementGroup

    @classmethod
    def book(cls, config: RunConfig, *, is_stopped: Callable[[], bool] = lambda: False) -> RunPlacement:
        """Place the run on the existing nodes, and wait for them to be free.

        Raises ResourceError: what is missing and where; KeyboardInterrupt when `is_stopped` is true.
        """
        nodes = cluster_nodes(config)
        placements = _place(config, nodes)
        booked = bundles(placements, strategy=config.cluster.placement)
        group = placement_group([bundle.resources for bundle in booked], strategy=config.cluster.placement)
        give_up_at = time.monotonic() + config.cluster.placement_timeout
        while not group.wait(min(POLL_S, config.cluster.placement_timeout)):
            if is_stopped():
                raise KeyboardInterrupt
            if time.monotonic() > give_up_at:
                ray.util.remove_placement_group(group)
                raise not_free(config, nodes)
        return cls(placements=placements, bundles=booked, group=group)

    def options(self, name: str) -> dict[str, Any]:
        """Ray's options for an actor: its name, its resources, its bundle."""
        one = next(one for one in self.placements if one.name == name)
        index = next(index for index, bundle in enumerate(self.bundles) if name in bundle.names)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)
        gpus = len(one.gpus) * one.share
        return {"name": name, "num_cpus": one.cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def options_of_a_joining(self, name: str, config: RunConfig) -> dict[str, Any]:
        """Options of a server that joins later: outside the group, on any node that has room.

        On a local cluster it reserves no CPUs: those of the run's start are taken, and serve as bookkeeping only.
        """
        sglang = config.sglang
        gpus = sglang.gpu_fraction * sglang.tp_size * sglang.dp_size if self.servers_on_gpu else 0
        return {
            "name": name,
            "num_cpus": 0 if config.cluster.address == "local" else sglang.num_cpus,
            "num_gpus": gpus,
        }

    def options_of_standby(self, name: str, config: RunConfig) -> dict[str, Any]:
        """Of the trainer's other actor, in the bundle of rank 0: it reserves nothing, as only one of the two works, and
        gets as many threads."""
        return {**self.options(rank_name(0)), "name": name, **_nothing_reserved(config)}

    def has(self, name: str) -> bool:
        """Whether an actor of that name has a placement; a server that joins later has none."""
        return any(one.name == name for one in self.placements)

    def further_ranks(self) -> tuple[Mapping[str, Any], ...]:
        """Options of the trainer's ranks from 1 on; rank 0 is the trainer itself.

        Without names: after a restart, those of the ranks before may still be taken.
        """
        further = (self.options(one.name) for one in self.placements if one.kind == RANK and one.index > 0)
        return tuple({key: value for key, value in options.items() if key != "name"} for options in further)

    def further_ranks_of_standby(self, config: RunConfig) -> tuple[Mapping[str, Any], ...]:
        """Those of the trainer's other actor, each in the bundle of its rank, without a reservation too."""
        return tuple({**options, **_nothing_reserved(config)} for options in self.further_ranks())

    @property
    def servers_on_gpu(self) -> bool:
        return any(one.gpus for one in self.placements if one.kind == SERVER)

    @property
    def shares_gpu(self) -> bool:
        """Whether a GPU holds a server and a trainer rank."""
        servers, ranks = (
            {(one.node, gpu) for one in self.placements if one.kind == kind for gpu in one.gpus}
            for kind in (SERVER, RANK)
        )
        return bool(servers & ranks)

    def nodes(self) -> dict[str, str]:
        """Where each actor is now, according to Ray: the address of its node."""
        on = placement_group_table(self.group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: _name(node) for node in alive_nodes()}
        return {
            name: addresses.get(on.get(index, ""), "nowhere")
            for index, bundle in enumerate(self.bundles)
            for name in bundle.names
        }


def _nothing_reserved(config: RunConfig) -> dict[str, Any]:
    threads = {"env_vars": {"OMP_NUM_THREADS": str(max(1, int(config.actor.num_cpus)))}}
    return {"num_cpus": 0, "num_gpus": 0, "runtime_env": threads}


def cluster_nodes(config: RunConfig) -> tuple[NodeResources, ...]:
    """The total resources of the living nodes, free or not. Raises ResourceError where there are too few nodes."""
    at_most = config.cluster.n_gpus_per_node
    found = tuple(_node(node, node["Resources"], at_most) for node in alive_nodes())
    if len(found) < config.cluster.n_nodes:
        raise ResourceError(
            f"cluster.n_nodes={config.cluster.n_nodes}: the cluster has {len(found)}: "
            + ", ".join(f"{node.name} with {node.gpus} GPUs and {node.cpus:g} CPUs" for node in found),
            "start Ray on the other ones (`ray start --address=…`), or lower cluster.n_nodes",
        )
    return found


def not_free(config: RunConfig, nodes: tuple[NodeResources, ...]) -> ResourceError:
    """The error for a cluster that is large enough, where others hold what is needed: what is missing."""
    waited = f"not free within cluster.placement_timeout={config.cluster.placement_timeout:g} s"
    by_id = available_resources_per_node()  # type: ignore[no-untyped-call]
    free = tuple(_node(node, by_id.get(node["NodeID"], {})) for node in alive_nodes())
    try:
        _place(config, free, like=nodes)
    except ResourceError as error:
        return ResourceError(f"{waited}: {error.message}", f"end what holds it (`ray status`), or {error.hint}")
    there = ", ".join(f"{node.name}: {node.gpus} GPUs and {node.cpus:g} CPUs free" for node in free)
    return ResourceError(f"{waited}: Ray has not placed it on {there}", "`ray status` shows what it waits for")


def _place(
    config: RunConfig, nodes: tuple[NodeResources, ...], *, like: tuple[NodeResources, ...] = ()
) -> tuple[ProcessPlacement, ...]:
    """`like`: the complete nodes, which decide what `auto` means; `nodes` may be what is free of them."""
    gpu = "cuda" if any(node.gpus for node in like or nodes) else "cpu"
    servers_on, trainer_on = (
        gpu if device == "auto" else device for device in (config.sglang.device, config.actor.device)
    )
    return place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=nodes)


def _node(node: Mapping[str, Any], resources: Mapping[str, float], at_most: int | None = None) -> NodeResources:
    gpus = int(resources.get("GPU", 0))
    gpus = gpus if at_most is None else min(gpus, at_most)
    return NodeResources(name=_name(node), gpus=gpus, cpus=resources.get("CPU", 0.0))


def _name(node: Mapping[str, Any]) -> str:
    """With the beginning of its id, as two raylets of one machine have one address."""
    return f"{node['NodeName']} ({node['NodeID'][:8]})"
