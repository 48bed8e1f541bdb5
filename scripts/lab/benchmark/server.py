"""Servers for a benchmark: a stand-in for SGLang, and a pool of those that run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from actors.rollout.server_pool import ServerPool
from launcher.base.messages import ServerInfo

STAND_IN = (sys.executable, "-m", "tests.programs.stand_in_server")
"""In the place of SGLang."""


async def pool_of(servers: Sequence[ServerInfo]) -> ServerPool:
    """These servers as a run's pool, without health probes."""

    async def no_probe(_: str) -> None:
        return None

    pool = ServerPool(no_probe)
    await pool.update(servers)
    return pool
