"""Where a server and the trainer meet when weights go over a group (actor.weight_update_mode=xccl)."""

from __future__ import annotations

import psutil

from launcher.config.schema import RunConfig

LOOPBACK = "127.0.0.1"


def group_address(config: RunConfig) -> str:
    """This node's side: loopback in a cluster of the run's own, in a running one, which may place it over several nodes
    whatever cluster.n_nodes asks for, the address by which that knows it."""
    if config.actor.weight_update_mode != "xccl" or config.cluster.address == "local":
        return LOOPBACK
    from ray.util import get_node_ip_address  # Ray, which most users of this module do without

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def interface_with(address: str) -> str | None:
    """The name of the interface of this machine that bears `address`; None where none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return name
    return None
