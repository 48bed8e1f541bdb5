"""The node that this process runs on, and the conversion of times from other nodes.

A pid of another node is another process here, and its CLOCK_MONOTONIC another clock. So messages about a process name
its node, and whoever reads them asks `is_here` before it reads /proc, opens a pidfd or compares times.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray

from launcher.base.messages import ServerExit

OF_RAY: Any = ray
"""For the parts of Ray without annotations."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_mine: list[str] = []


def this_node() -> str:
    """Ray's id of this process's node; "" outside Ray."""
    if not _mine and ray.is_initialized():
        _mine.append(ray.get_runtime_context().get_node_id())
    return _mine[0] if _mine else ""


def is_here(node: str) -> bool:
    """Whether a pid of that node can be looked at from here; "" is this node."""
    return node in ("", this_node())


def on_this_clock(end: ServerExit) -> ServerExit:
    """The same with its time on this machine's clock, as exactly as the wall clocks agree."""
    if is_here(end.node):
        return end
    return replace(end, monotonic=time.monotonic() - max(0.0, time.time() - end.at))


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in OF_RAY.nodes() if node["Alive"]]


def listening_address(host: str) -> str:
    """Where a server of this node listens: not on loopback where there are, or were, other nodes."""
    if host not in LOOPBACK or len(OF_RAY.nodes()) <= 1:
        return host
    return str(OF_RAY.util.get_node_ip_address())
