"""Finds settings that no machine of the described size can place. Pure.

What only the machine or the cluster itself can answer is left to `launcher.resources.run_plan` and the driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from launcher.base.errors import ResourceError
from launcher.config.schema import RunConfig
from launcher.resources.capacity import NodeResources, node_name
from launcher.resources.placement import ENDLESS, describe_booking, gpus_needed, place


def find_unplaceable(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed. Only where the number of GPUs or CPUs of a node is given."""
    sglang, cluster = config.sglang, config.cluster
    devices = (sglang.device, config.actor.device)
    over = sglang.tp_size * sglang.dp_size
    if over > 1 and sglang.gpu_fraction != 1:
        copies = f" × sglang.dp_size={sglang.dp_size}" if sglang.dp_size > 1 else ""
        allowed = f"1 with sglang.tp_size={sglang.tp_size}{copies}: a server over several GPUs reserves all of each"
        yield "sglang.gpu_fraction", allowed
        return
    per_node = cluster.n_gpus_per_node
    cpus_given = cluster.address != "local" and config.hardware.n_cpus_per_node is not None
    if (per_node is None and not cpus_given) or (per_node == 0 and "cuda" not in devices and not cpus_given):
        return
    if per_node is None:
        per_node = ENDLESS
    there = max(1, per_node * cluster.n_nodes)
    of_nodes = f"cluster.n_gpus_per_node={per_node}" + (f" × {cluster.n_nodes} nodes" if cluster.n_nodes > 1 else "")
    if sglang.device != "cpu" and over > there:
        key, other = ("tp_size", sglang.dp_size) if sglang.tp_size > there else ("dp_size", sglang.tp_size)
        each = f", with {other} GPUs for each" if other > 1 else ""
        yield f"sglang.{key}", f"at most {of_nodes}{each}"
    elif config.actor.device != "cpu" and config.actor.dp_size > there:
        yield "actor.dp_size", f"at most {of_nodes}: one GPU a rank"
    else:
        yield from _without_room(config, devices, per_node)


def _without_room(config: RunConfig, devices: tuple[str, str], per_node: int) -> Iterator[tuple[str, str]]:
    cluster = config.cluster
    described = config.hardware.n_cpus_per_node if cluster.address != "local" else None
    cpus = math.inf if described is None else float(described)
    nodes = [NodeResources(name=node_name(number), gpus=per_node, cpus=cpus) for number in range(cluster.n_nodes)]
    try:
        place(config, servers_on=devices[0], trainer_on=devices[1], nodes=nodes)
    except ResourceError as error:
        if error.message.startswith("CPUs"):
            yield "hardware.n_cpus_per_node", f"{error.message}: {error.hint}"
            return
        needed = gpus_needed(config, servers_on=devices[0], trainer_on=devices[1])
        allowed = (
            f"{needed} GPUs are needed: {describe_booking(config)}; to share one, "
            f"sglang.gpu_fraction and actor.gpu_fraction must sum to at most 1 ({error.message})"
        )
        yield "cluster.n_gpus_per_node", allowed
