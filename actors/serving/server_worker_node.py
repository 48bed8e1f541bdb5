"""A further node's part of a server that spans nodes, as a Ray actor: it computes, and serves nobody.

SGLang runs no HTTP server for requests on `--node-rank` 1 and above, so such a part has no life to be judged by: it is
watched for its end alone, by the first node's actor (`spanning_life.py`), which is the server to everybody else.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import ray

from actors.cluster.fencing import bind_to_cluster, raylet_pid
from actors.serving.server_incarnation import ServerIncarnation, ServerSpec
from actors.serving.sglang_command import NodeSpan
from launcher.base.errors import ServerError
from launcher.base.messages import ServerExit
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.run_files.run_keys import SERVERS
from launcher.run_files.run_paths import RunPaths

NOBODYS = "127.0.0.1"
"""Where SGLang answers a health check on these nodes, which nobody of ours asks, and which knows no keys."""


@ray.remote
class ServerWorkerNode:
    """`start`, then `wait_exit`; `stop` at any time. A start ends the part before it, so one life holds the GPUs."""

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
        )
        self._owners = [pid for pid in (os.getpid(), raylet_pid()) if pid is not None]
        self._life: ServerIncarnation | None = None
        self._turn = asyncio.Lock()  # a stop that overtook a start would leave what it starts

    async def start(
        self, *, config: SGLangConfig, span: NodeSpan, generation: int, model_path: str, weight_version: int
    ) -> int:
        """Launch this node's part; returns its pid. Raises ResourceError, ServerError."""
        async with self._turn:
            await self._end()
            spec = replace(self._spec, config=replace(config, host=NOBODYS, port=None), span=span)
            self._life = await ServerIncarnation.launch(
                spec, self._owners, generation=generation, model_path=model_path, weight_version=weight_version
            )
            return self._life.pid

    async def wait_exit(self) -> ServerExit:
        """Until the part that was started last has ended. Raises ServerError where none was, as in a new process."""
        if self._life is None:
            raise ServerError(f"{self._spec.name}: no part of it runs here")
        return await self._life.wait_exit()

    async def stop(self) -> None:
        """Harmless at any time."""
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        if self._life is not None:
            await self._life.end()
