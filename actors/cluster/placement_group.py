"""Reserves the run's resources: one placement group for all its actors, and each actor's options for its bundle.

One group rather than one for each actor: several that are rescheduled at once after a node's loss could each hold what
another waits for. An actor that Ray restarts returns to its own bundle; a bundle whose node is lost moves to another
node as soon as one has room.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.node_identity import OF_RAY, alive_nodes
from launcher.base.errors import ResourceError
from launcher.config.schema import RunConfig
from launcher.resources.placement import (
    RANK,
    SERVER,
    Bundle,
    NodeResources,
    Placement,
    amounts,
    no_room,
    place,
    rank_name,
)

POLL_S = 0.5
INFEASIBLE, NO_RESOURCES = "INFEASIBLE", "NO_RESOURCES"
"""Ray's words for a group of which one bundle is larger than any node, and for one that has no room now."""
ALLOCATOR, ITS_OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlacement:
    """The reserved bundles: each is on a node, and stays this run's until its driver ends. `on_gpu`: what the
    environment of a trainer rank on a GPU has besides."""

    placed: Placement
    group: PlacementGroup
    on_gpu: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def book(cls, config: RunConfig, *, is_stopped: Callable[[], bool] = lambda: False) -> RunPlacement:
        """Have Ray place the run, and wait while others hold what it needs.

        Raises ResourceError: what was asked for and what there is; KeyboardInterrupt when `is_stopped` is true.
        """
        nodes = cluster_nodes(config)
        placed, within_s = _place(config, nodes), config.cluster.placement_timeout
        group = placement_group([one.resources for one in placed.bundles], strategy=config.cluster.placement)
        give_up_at = time.monotonic() + within_s
        while not group.wait(min(POLL_S, within_s)):
            if is_stopped():
                raise KeyboardInterrupt
            word = placement_group_table(group)["stats"]["scheduling_state"]
            # Where the complete nodes have no room either, to wait would only delay the refusal.
            is_hopeless = word == INFEASIBLE or (word == NO_RESOURCES and placed.shortage is not None)
            if is_hopeless or time.monotonic() > give_up_at:
                ray.util.remove_placement_group(group)
                when = "" if is_hopeless else f" within cluster.placement_timeout={within_s:g} s"
                raise not_placed(config, placed.bundles, nodes, f"Ray has not placed the run{when} ({word})")
        return cls(placed=placed, group=group, on_gpu=allocator_variables(config))

    def options(self, name: str) -> dict[str, Any]:
        """Ray's options for an actor: its name, its resources, its bundle."""
        index = next(index for index, bundle in enumerate(self.placed.bundles) if name in bundle.names)
        one = next(one for one in self.placed.bundles[index].processes if one.name == name)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)
        gpus = one.n_gpus * one.share
        # Ray's way into the process: torch reads the variables when it is imported
        own = {"runtime_env": {"env_vars": dict(self.on_gpu)}} if one.kind == RANK and gpus and self.on_gpu else {}
        return {"name": name, "num_cpus": one.cpus, "num_gpus": gpus, "scheduling_strategy": strategy, **own}

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
        return {**_nothing_reserved(self.options(rank_name(0)), config), "name": name}

    def has(self, name: str) -> bool:
        """Whether an actor of that name has a placement; a server that joins later has none."""
        return any(name in bundle.names for bundle in self.placed.bundles)

    def further_ranks(self) -> tuple[Mapping[str, Any], ...]:
        """Options of the trainer's ranks from 1 on; rank 0 is the trainer itself.

        Without names: after a restart, those of the ranks before may still be taken.
        """
        ranks = sorted(one.index for one in self.placed.processes if one.kind == RANK)
        further = (self.options(rank_name(rank)) for rank in ranks[1:])
        return tuple({key: value for key, value in options.items() if key != "name"} for options in further)

    def further_ranks_of_standby(self, config: RunConfig) -> tuple[Mapping[str, Any], ...]:
        """Those of the trainer's other actor, each in the bundle of its rank, without a reservation too."""
        return tuple(_nothing_reserved(options, config) for options in self.further_ranks())

    @property
    def servers_on_gpu(self) -> bool:
        return any(one.n_gpus for one in self.placed.processes if one.kind == SERVER)

    @property
    def shares_gpu(self) -> bool:
        """Whether a GPU holds a server and a trainer rank."""
        return any({one.kind for one in bundle.processes} == {SERVER, RANK} for bundle in self.placed.bundles)

    def nodes(self) -> dict[str, str]:
        """Where each actor is now, according to Ray: the address of its node."""
        on = placement_group_table(self.group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: _name(node) for node in alive_nodes()}
        return {
            name: addresses.get(on.get(index, ""), "nowhere")
            for index, bundle in enumerate(self.placed.bundles)
            for name in bundle.names
        }


def _nothing_reserved(options: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    own = options.get("runtime_env", {}).get("env_vars", {})
    variables = {**own, "OMP_NUM_THREADS": str(max(1, int(config.actor.num_cpus)))}
    return {**options, "num_cpus": 0, "num_gpus": 0, "runtime_env": {"env_vars": variables}}


def allocator_variables(config: RunConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """torch's segments of a trainer's GPU memory grow, so that micro-batches of other lengths leave fewer holes.

    Not where new weights go as tensors: CUDA IPC can't share memory of such a segment (torch 2.11, "Tensors allocated
    with expandable_segments:True cannot be shared"). Not over what a person has set: on a cluster that the
    run joins, its processes have the environment in which each node's Ray was started, which can't be seen from here.
    """
    is_seen = config.cluster.address == "local"
    is_chosen = not {ALLOCATOR, ITS_OLD_NAME}.isdisjoint(environment)
    if config.actor.weight_update_mode == "tensor" or not is_seen or is_chosen:
        return {}
    return {ALLOCATOR: "expandable_segments:True"}


def cluster_nodes(config: RunConfig) -> tuple[NodeResources, ...]:
    """The total resources of the living nodes, free or not. Raises ResourceError where there are too few nodes."""
    at_most = math.inf if config.cluster.n_gpus_per_node is None else config.cluster.n_gpus_per_node
    found = tuple(
        NodeResources(
            name=_name(node),
            gpus=min(node["Resources"].get("GPU", 0.0), at_most),
            cpus=node["Resources"].get("CPU", 0.0),
        )
        for node in alive_nodes()
    )
    if len(found) < config.cluster.n_nodes:
        raise ResourceError(
            f"cluster.n_nodes={config.cluster.n_nodes}: the cluster has {len(found)}: "
            + ", ".join(f"{node.name} with {amounts(node.gpus, node.cpus)}" for node in found),
            "start Ray on the other ones (`ray start --address=…`), or lower cluster.n_nodes",
        )
    return found


def not_placed(config: RunConfig, bundles: Sequence[Bundle], nodes: Sequence[NodeResources], why: str) -> ResourceError:
    """What was asked for, by role, and what Ray says that the cluster has and has free."""
    free = OF_RAY.available_resources()
    left = NodeResources(name="free", gpus=free.get("GPU", 0.0), cpus=free.get("CPU", 0.0))
    found = no_room(config, bundles, nodes, free=[left])
    message = f"{why}: {found.message}, {amounts(left.gpus, left.cpus)} free"
    return ResourceError(message, f"end what holds it (`ray status`), or {found.hint}")


def _place(config: RunConfig, nodes: Sequence[NodeResources]) -> Placement:
    gpu = "cuda" if any(node.gpus for node in nodes) else "cpu"
    servers_on, trainer_on = (
        gpu if device == "auto" else device for device in (config.sglang.device, config.actor.device)
    )
    return place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=nodes)


def _name(node: Mapping[str, Any]) -> str:
    """With the beginning of its id, as two raylets of one machine have one address."""
    return f"{node['NodeName']} ({node['NodeID'][:8]})"
