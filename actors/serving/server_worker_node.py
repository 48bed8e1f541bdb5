"""The part of a multi-node server on one further node, as a Ray actor: it computes and serves no requests.

SGLang runs no HTTP server for requests on `--node-rank` 1 and above, so only the end of such a part can be watched; the
first node's actor does that (`multi_node_server.py`).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import ray

from actors.cluster.fencing import bind_to_cluster, raylet_pid
from actors.serving.group_address import group_address
from actors.serving.server_host import ServerHost
from actors.serving.server_incarnation import LaunchOrder, ServerIncarnation, ServerSpec
from actors.serving.sglang_command import NodeSpan
from launcher.base.errors import ServerError
from launcher.base.messages import ServerExit
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.run_files.run_keys import SERVERS
from launcher.run_files.run_paths import RunPaths

NOBODYS = "127.0.0.1"
"""Where SGLang answers a health check on these nodes, without keys. Nothing of ours uses it."""


@ray.remote
class ServerWorkerNode:
    """`start`, then `wait_exit`; `stop` at any time. A start ends the part before it, so only one holds the GPUs."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, index: int, node_rank: int, entry: tuple[str, ...] | None = None
    ) -> None:
        bind_to_cluster(config)
        log = paths.server_log(index)
        self._spec = ServerSpec(
            index=index,
            config=config.sglang,
            log=log.with_name(f"{log.stem}.{node_rank}{log.suffix}"),
            keys=paths.keys / SERVERS,
            setup_timeout_s=config.rollout.setup_timeout,
            gpu_ids=tuple(map(str, ray.get_gpu_ids())),
            entry=entry,
            meets_at=group_address(config),
        )
        self._owners = [pid for pid in (os.getpid(), raylet_pid()) if pid is not None]
        self._host = ServerHost(within_s=config.rollout.setup_timeout)
        self._part: ServerIncarnation | None = None
        self._turn = asyncio.Lock()  # a stop that overtook a start would leave what it starts

    async def start(self, *, config: SGLangConfig, span: NodeSpan, order: LaunchOrder) -> int:
        """Launch this node's part; returns its pid. Raises ResourceError, ServerError."""
        async with self._turn:
            await self._end()
            spec = replace(self._spec, config=replace(config, host=NOBODYS, port=None), span=span)
            self._part = await ServerIncarnation.launch(spec, self._owners, order, self._host)
            return self._part.pid

    async def wait_exit(self) -> ServerExit:
        """Until the newest part has ended. Raises ServerError where none was started in this process."""
        if self._part is None:
            raise ServerError(f"{self._spec.name}: no part of it runs here")
        return await self._part.wait_exit()

    async def stop(self) -> None:
        """Harmless at any time."""
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        if self._part is not None:
            await self._part.end()
