"""One SGLang server through all its incarnations: start, wait until ready, watch, stop.

`SGLangProcess` is the plain class; `SGLangServer` is the Ray actor around it, whose server ends with its worker and
its raylet.

    start ─► STARTING ─► STALE ─► READY ─► DEAD       ended by itself
                 │ answers │ generates     STOPPED    by request
                 └─────────┴────────────► FAILED     never became READY

READY means that it generated tokens, and that they came from the weight version asked for. Later versions are
confirmed to the trainer's pool (actors/rollout/server_pool.py).

`start` and `stop` act; `wait_ready` and `wait_exit` wait for the server's answers and for its host, which reports its
end within milliseconds; `info` never waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import ray

from actors.cluster.fencing import bind_to_cluster, raylet_pid
from actors.cluster.node_identity import listening_address, this_node
from actors.cluster.server_gpus import ServerGpus
from actors.serving.group_address import group_address
from actors.serving.readiness_proof import ReadinessProof
from actors.serving.remote_process_probe import RemoteObservation, RemoteProcessProbe
from actors.serving.server_host import ServerHost
from actors.serving.server_incarnation import LaunchOrder, ServerIncarnation, ServerSpec, exit_words
from actors.serving.setting_overrides import with_overrides
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import LauncherError, RequestFailed, ServerError
from launcher.base.messages import Overrides, ServerExit, ServerInfo, ServerState
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.resources.cuda_graphs import with_graphs
from launcher.resources.hardware import OomKillWatch
from launcher.run_files.run_keys import SERVERS, ServerKeys
from launcher.run_files.run_paths import RunPaths

FIRST_GENERATION = "it answers; kernels that are compiled at their first use may still be compiling"
OVER = frozenset({ServerState.STOPPED, ServerState.DEAD, ServerState.FAILED})

T = TypeVar("T")


class SGLangProcess:
    """Starts, watches and ends the server of `spec`, which ends with any of the processes `owners`. On one loop."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        owners: tuple[int, ...],
        host: ServerHost | None = None,
    ) -> None:
        """`host`: one that forks others than SGLang's."""
        self._spec = spec
        self._owners = owners
        self._host = host or ServerHost(within_s=spec.setup_timeout_s)
        self._info = ServerInfo(
            name=spec.name, index=spec.index, generation=-1, state=ServerState.STOPPED, node=spec.node
        )
        self._launch: asyncio.Task[ServerIncarnation] | None = None
        self._ready: asyncio.Task[ServerInfo] | None = None
        self._stopping = False
        self._stopped: set[int] = set()  # generations that were told to stop
        self._begun = asyncio.Event()

    def info(self) -> ServerInfo:
        """As last known."""
        return self._info

    def configure(self, config: SGLangConfig) -> None:
        """Settings for later incarnations; the current one keeps its own."""
        self._spec = replace(self._spec, config=config)

    async def start(self, *, generation: int, model_path: str, weight_version: int) -> ServerInfo:
        """Launch an incarnation with the weights in `model_path`. Returns while it is STARTING; one that waits for its
        host has no pid yet.

        Raises ResourceError where its port is in use, ServerError where the one before has not ended.
        """
        if self._info.state not in OVER:
            raise ServerError(
                f"{self._spec.name} can't start generation {generation}: generation {self._info.generation} "
                f"is {self._info.state}",
                "stop it first",
            )
        self._stopping = False
        self._info = ServerInfo(
            name=self._spec.name,
            index=self._spec.index,
            generation=generation,
            state=ServerState.STARTING,
            node=self._spec.node,
        )
        order = LaunchOrder(generation=generation, model_path=model_path, weight_version=weight_version)
        self._launch = _task(self._begin(self._launch, order))
        self._ready = _task(self._become_ready(self._launch))
        self._begun.set()
        imports = _task(self._host.importing.wait())
        await asyncio.wait([self._launch, imports], return_when=asyncio.FIRST_COMPLETED)
        imports.cancel()
        if self._launch.done():
            self._launch.result()
        return self._info

    async def wait_ready(self) -> ServerInfo:
        """Until the newest incarnation is READY; raises what prevented it. May be called several times.

        It waits for the first start too: Ray may deliver two calls to an async actor in either order. For a later
        incarnation, call it only after `start` has returned.
        """
        await self._begun.wait()
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def wait_exit(self) -> ServerExit:
        """Until the newest incarnation has ended, for whatever reason. May be called several times."""
        await self._begun.wait()
        assert self._launch is not None
        end = await (await asyncio.shield(self._launch)).wait_exit()
        return replace(end, was_told=end.was_told and end.generation in self._stopped)  # not where it was given up here

    async def stop(self) -> ServerInfo:
        """End the process tree; returns when it is gone and its port is free. Harmless at any time."""
        self._stopping = True
        launch, generation = self._launch, self._info.generation
        self._stopped.add(generation)
        if launch is not None:
            self._host.stop_waiting()
            await asyncio.wait([launch])
            if launch.exception() is None:
                await launch.result().end()
        if self._info.generation != generation:  # the next one was started meanwhile: it is not what is stopped
            return self._info
        if self._info.generation != generation:
            return self._info
        self._info = replace(self._info, state=ServerState.STOPPED, reason="told to stop")
        return self._info

    async def close(self) -> None:
        """Stop it, and end its host."""
        await self.stop()
        await self._host.end()

    # ── within one incarnation ──

    async def _begin(self, earlier: asyncio.Task[ServerIncarnation] | None, order: LaunchOrder) -> ServerIncarnation:
        try:
            if earlier is not None and earlier.exception() is None:
                await earlier.result().end()  # its port, its files and its memory, before the next one takes them
            server = await ServerIncarnation.launch(self._spec, self._owners, order, self._host)
        except LauncherError as error:
            self._info = replace(self._info, state=ServerState.FAILED, reason=error.message)
            raise
        self._info = replace(self._info, url=server.url, pid=server.pid)
        return server

    async def _become_ready(self, launch: asyncio.Task[ServerIncarnation]) -> ServerInfo:
        server = await asyncio.shield(launch)
        watching = _task(self._watch(server))
        serving = _task(self._serve(server))
        await asyncio.wait([serving, watching], timeout=self._spec.setup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        failure = self._failure(server, serving, watching)
        if failure is None:
            return self._info
        serving.cancel()
        if not self._stopping:
            self._info = replace(self._info, state=ServerState.FAILED, reason=failure.message)
            await server.end()
        raise failure

    async def _serve(self, server: ServerIncarnation) -> None:
        async with SGLangClient(ServerKeys.read_file(self._spec.keys)) as client:
            await server.wait_answers(client)
            self._info = replace(self._info, state=ServerState.STALE, reason=FIRST_GENERATION)
            held = await server.generate(client)
        if held != server.weight_version:
            raise ServerError(f"it generates with weight version {held}, not {server.weight_version}")
        self._info = replace(self._info, state=ServerState.READY, weight_version=held, reason="")

    def _failure(
        self, server: ServerIncarnation, serving: asyncio.Task[None], watching: asyncio.Task[ServerExit]
    ) -> ServerError | None:
        """Why `server` is not READY; None where it is."""
        if watching.done():
            end = watching.result()
            if self._stopping:
                return server.why_not_ready("it was stopped")
            how = "" if end.exit_code is None else f" with {exit_words(end.exit_code)}"
            return server.why_not_ready(f"it, or a part of it, ended{how}")
        error = serving.exception() if serving.done() else None
        if not serving.done() or (isinstance(error, RequestFailed) and error.kind == "timeout"):
            within = f"no generation within {self._spec.setup_timeout_s:g} s"
            is_compiling = self._info.state is ServerState.STALE
            return server.why_not_ready(f"{within} ({FIRST_GENERATION})" if is_compiling else within)
        if error is None:
            return None
        return server.why_not_ready(error.message if isinstance(error, LauncherError) else repr(error))

    async def _watch(self, server: ServerIncarnation) -> ServerExit:
        """Record the end in `info`, unless a later incarnation has begun."""
        end = await server.wait_exit()
        if self._info.generation == server.generation and self._info.state not in OVER:
            was_ready = self._info.state is not ServerState.STARTING
            ended = ServerState.DEAD if was_ready else ServerState.FAILED
            self._info = replace(self._info, state=ServerState.STOPPED if self._stopping else ended, reason=end.reason)
        return end


def _task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error is raised where it is awaited, and not logged where it isn't."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


@ray.remote
class SGLangServer:
    """An `SGLangProcess` as a Ray actor: its server ends with this worker and with the raylet, so with the run.

    All methods are coroutines on one loop, so `info` always answers.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        index: int,
        entry: tuple[str, ...] | None = None,
    ) -> None:
        bind_to_cluster(config)
        self._config = config
        self._gpus = ServerGpus(tuple(map(str, ray.get_gpu_ids())))
        spec = ServerSpec(
            index=index,
            config=with_graphs(config),
            log=paths.server_log(index),
            keys=paths.keys / SERVERS,
            setup_timeout_s=config.rollout.setup_timeout,
            gpu_ids=self._gpus.numbers,
            entry=entry,
            node=this_node(),
            meets_at=group_address(config),
            proof=ReadinessProof.of(config),
        )
        owners = [os.getpid(), raylet_pid()]
        self._process = SGLangProcess(
            spec,
            owners=tuple(pid for pid in owners if pid is not None),
        )
        self._probe = RemoteProcessProbe()
        self._kills = OomKillWatch()

    async def start(
        self,
        *,
        generation: int,
        model_path: str,
        weight_version: int,
        overrides: Overrides | None = None,
    ) -> ServerInfo:
        """`overrides`: settings that a repair has changed."""
        config = with_graphs(with_overrides(self._config, overrides or {}))
        await self._gpus.watch()
        self._process.configure(replace(config, host=listening_address(config.host)))
        return await self._process.start(generation=generation, model_path=model_path, weight_version=weight_version)

    async def wait_ready(self) -> ServerInfo:
        return await self._process.wait_ready()

    async def wait_exit(self) -> ServerExit:
        ended = await self._gpus.explained(await self._process.wait_exit())
        return replace(ended, oom_kills=self._kills.risen())

    async def look(self, pid: int) -> RemoteObservation:
        """The server's processes, for a HealthMonitor on another node, which can't see them."""
        return self._probe.look(pid)

    async def stop(self) -> ServerInfo:
        return await self._process.stop()

    async def info(self) -> ServerInfo:
        found = self._process.info()
        if found.state not in OVER:
            self._kills.look()
        return found
