"""Servers that a pool takes for READY, and pools of them."""

from actors.rollout.server_pool import ServerPool
from launcher.base.messages import ServerInfo, ServerState


def ready(url, index=0, **changes):
    """Server `index` at `url`, with weight version 0."""
    given = {"name": f"server-{index}", "index": index, "generation": 0, "state": ServerState.READY}
    return ServerInfo(url=url, **{**given, "weight_version": 0, **changes})


async def nobody(url):
    """A probe that no server answers."""


async def pool_of(urls, *, version=0, probe=nobody):
    pool = ServerPool(probe)
    await pool.update(ready(url, index, weight_version=version) for index, url in enumerate(urls))
    return pool
