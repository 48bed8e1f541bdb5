"""Finds out whether Ray killed a process because the machine ran out of memory, on a cluster that lets Ray do so.

In a cluster of the run's own Ray's memory monitor is off: the kernel kills, and counts its kills. Elsewhere Ray may
kill before the kernel. The error of an actor that may restart says only that it was restarted; the reason is in Ray's
state API, which the cluster's dashboard answers some milliseconds after the end.
"""

from __future__ import annotations

import asyncio
import logging
import os

import ray

MONITOR_INTERVAL = "RAY_memory_monitor_refresh_ms"
"""Ray hands its environment on to what it starts; "0": its memory monitor is off."""
WITHIN_S = 5.0
"""A dashboard on a busy machine needs more than a second, and what it doesn't say in time counts as a crash."""
LOOK_S = 0.02

log = logging.getLogger("nodes")


def listed_reason(node: str, pid: int) -> str | None:
    """Ray's reason for a kill for memory; "" for any other end, None where the end isn't listed yet."""
    from ray.util.state import list_workers  # 11 MiB and 0.4 s, for which few runs have a use

    ours = ray.get_runtime_context().gcs_address  # else, beside another cluster, it refuses to choose among them
    listed = list_workers(address=ours, filters=[("node_id", "=", node), ("pid", "=", pid)], detail=True, timeout=1)
    if not listed:
        return None
    newest = max(listed, key=lambda one: one.start_time_ms or 0)  # pids come again
    if newest.is_alive:
        return None
    return newest.exit_detail or "" if newest.exit_type == "NODE_OUT_OF_MEMORY" else ""


async def killed_for_memory(node: str, pid: int) -> str:
    """Ray's reason; "" where it ended otherwise, or Ray doesn't report it in time."""
    if not ray.is_initialized() or os.environ.get(MONITOR_INTERVAL) == "0":
        return ""
    try:
        async with asyncio.timeout(WITHIN_S):
            while (said := await asyncio.to_thread(listed_reason, node, pid)) is None:
                await asyncio.sleep(LOOK_S)
            return said
    except Exception as error:  # noqa: BLE001 - no dashboard, or no answer in time: Ray's own errors are many, and bare
        log.warning("ray_kills.not_known pid=%d reason=%r", pid, error)
        return ""
