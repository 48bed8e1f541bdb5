"""The node that this process runs on.

A pid of another node is another process here. So messages about a process name its node, and whoever reads them asks
`is_here` before it reads /proc or opens a pidfd. Its clock is another one too: messages have ages in place of times.
"""

from __future__ import annotations

from typing import Any

import ray

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


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in OF_RAY.nodes() if node["Alive"]]


def listening_address(host: str) -> str:
    """Where a server of this node listens: not on loopback where there are, or were, other nodes."""
    if host not in LOOPBACK or len(OF_RAY.nodes()) <= 1:
        return host
    return str(OF_RAY.util.get_node_ip_address())
