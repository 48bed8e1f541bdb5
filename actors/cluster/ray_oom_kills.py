"""Finds out whether Ray killed a process because the machine ran out of memory; Ray does that before the kernel would.

Ray notes the reason in its store only, some milliseconds after the end: a restartable actor's callers learn nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

import ray
import ray._private.state as ray_state
from ray.core.generated.common_pb2 import WorkerExitType  # type: ignore[attr-defined]  # made at its import
from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]  # made at its import

WITHIN_S = 1.0
LOOK_S = 0.02

log = logging.getLogger("nodes")


def listed_reason(node: str, pid: int) -> str | None:
    """Ray's reason for a kill for memory; "" for any other end, None where the end isn't listed yet."""
    listed = (WorkerTableData.FromString(raw) for raw in ray_state.state._connect_and_get_accessor().get_worker_table())
    of_it = [one for one in listed if one.pid == pid and one.worker_address.node_id.hex() == node]
    if not of_it:
        return None
    newest = max(of_it, key=lambda one: int(one.start_time_ms))  # pids come again
    if newest.is_alive:
        return None
    return str(newest.exit_detail) if newest.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY else ""


async def killed_for_memory(node: str, pid: int) -> str:
    """Ray's reason; "" where it ended otherwise, or Ray doesn't report it in time."""
    if not ray.is_initialized():
        return ""
    give_up_at = time.monotonic() + WITHIN_S
    while (left_s := give_up_at - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                said = await asyncio.to_thread(listed_reason, node, pid)
        except Exception as error:  # noqa: BLE001 - Ray's own errors here are many, and bare
            log.warning("ray_kills.not_known pid=%d reason=%r", pid, error)
            return ""
        if said is not None:
            return said
        await asyncio.sleep(LOOK_S)
    return ""
