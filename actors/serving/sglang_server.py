"""One SGLang server over all its lives: start, ready, watch, stop.

`SGLangProcess` is the plain class; `SGLangServer` is the Ray actor around it, which adds the ties to its worker and
its raylet.

    start ─► STARTING ─► STALE ─► READY ─► DEAD       ended by itself
                 │ answers │ generates     STOPPED    was told to
                 └─────────┴────────────► FAILED     never became READY

READY means that it generated tokens, and that they came from the weight version asked for. From then on the version
is what the server said when it was last asked (`confirm_weights`), never what somebody meant it to be.

Consumes: `start`, `confirm_weights`, `stop`. Waits for: `wait_ready`, `wait_exit`. Unblocked by: the server's answers,
and its guard, which tells of its end within milliseconds. `info` waits for nobody.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray

from actors.cluster.fencing import hold_lease
from actors.cluster.node_identity import lease_of, listening_address, this_node
from actors.cluster.raylet_lifetime import die_with_raylet, raylet_pid
from actors.serving.multi_node_server import MultiNodeServer, WorkerNodes
from actors.serving.remote_process_probe import RemoteObservation, RemoteProcessProbe
from actors.serving.server_incarnation import ServerIncarnation, ServerSpec, exit_words
from actors.serving.setting_overrides import with_overrides
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import LauncherError, RequestFailed, ServerError, WeightsRefused
from launcher.base.messages import Overrides, ServerExit, ServerInfo, ServerState
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.resources.hardware import OomKillWatch
from launcher.run_files.run_keys import SERVERS, ServerKeys
from launcher.run_files.run_paths import RunPaths

ASK_TIMEOUT_S = 10.0
OVER = frozenset({ServerState.STOPPED, ServerState.DEAD, ServerState.FAILED})

T = TypeVar("T")


class SGLangProcess:
    """Starts, watches and ends the server of `spec`, which dies with any of the processes `owners`.

    Used on one asyncio loop.
    """

    def __init__(self, spec: ServerSpec, *, owners: tuple[int, ...], seats: WorkerNodes | None = None) -> None:
        """`seats`: of the other nodes, where the server spans several."""
        self._spec = spec
        self._owners = owners
        self._launch_life = ServerIncarnation.launch if seats is None else partial(MultiNodeServer.launch_over, seats)
        self._seats = seats
        self._info = ServerInfo(
            name=spec.name, index=spec.index, generation=-1, state=ServerState.STOPPED, node=spec.node
        )
        self._launch: asyncio.Task[ServerIncarnation] | None = None
        self._ready: asyncio.Task[ServerInfo] | None = None
        self._stopping = False
        self._begun = asyncio.Event()

    def info(self) -> ServerInfo:
        """As last known."""
        return self._info

    def configure(self, config: SGLangConfig) -> None:
        """Settings of the lives to come; the one that runs keeps its own."""
        self._spec = replace(self._spec, config=config)

    async def start(self, *, generation: int, model_path: str, weight_version: int) -> ServerInfo:
        """Launch life `generation`, whose weights in `model_path` are `weight_version`. Returns while it is STARTING.

        Raises ResourceError where its port is in use, ServerError where an earlier life is not over.
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
        self._launch = _task(self._begin(self._launch, generation, model_path, weight_version))
        self._ready = _task(self._become_ready(self._launch))
        self._begun.set()
        await asyncio.shield(self._launch)
        return self._info

    async def wait_ready(self) -> ServerInfo:
        """Until the life started last is READY. Raises what kept it from that, whoever asks and how often.

        Before the first start it waits for that: Ray may deliver two calls to an async actor in either order. Of a
        later life, ask only when `start` has returned.
        """
        await self._begun.wait()
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def wait_exit(self) -> ServerExit:
        """Until the life started last has ended, for whatever reason; told as often as asked."""
        await self._begun.wait()
        assert self._launch is not None
        return await (await asyncio.shield(self._launch)).wait_exit()

    async def confirm_weights(self, weight_version: int) -> ServerInfo:
        """Ask the server which weights it holds, after an update, and take its word into `info`.

        Raises WeightsRefused where it says another version (it is STALE then), RequestFailed where it says nothing.
        """
        async with SGLangClient(ServerKeys.read_file(self._spec.keys)) as client:
            held = (await client.model_info(self._info.url, timeout_s=ASK_TIMEOUT_S)).weight_version
        if self._info.state in {ServerState.STALE, ServerState.READY}:
            state = ServerState.READY if held == weight_version else ServerState.STALE
            self._info = replace(self._info, state=state, weight_version=held, reason="")
        if held != weight_version:
            raise WeightsRefused(f"{self._spec.name} holds weight version {held}, not {weight_version}")
        return self._info

    async def stop(self) -> ServerInfo:
        """End the whole tree; returns when it is gone and its port is free. Harmless at any time, and repeatable."""
        self._stopping = True
        launch, generation = self._launch, self._info.generation
        if launch is not None:
            await asyncio.wait([launch])
            if launch.exception() is None:
                await launch.result().end()
        if self._info.generation != generation:  # the next one was started meanwhile: it is not what is stopped
            return self._info
        if self._seats is not None:  # an earlier process of this actor may have started them
            await self._seats.stop()
        if self._info.generation != generation:
            return self._info
        self._info = replace(self._info, state=ServerState.STOPPED, reason="told to stop")
        return self._info

    # ── within one life ──

    async def _begin(
        self, earlier: asyncio.Task[ServerIncarnation] | None, generation: int, model_path: str, weight_version: int
    ) -> ServerIncarnation:
        try:
            if earlier is not None and earlier.exception() is None:
                await earlier.result().end()  # its port, its files and its memory, before the next one takes them
            life = await self._launch_life(
                self._spec,
                self._owners,
                generation=generation,
                model_path=model_path,
                weight_version=weight_version,
            )
        except LauncherError as error:
            self._info = replace(self._info, state=ServerState.FAILED, reason=error.message)
            raise
        self._info = replace(self._info, url=life.url, pid=life.pid)
        return life

    async def _become_ready(self, launch: asyncio.Task[ServerIncarnation]) -> ServerInfo:
        life = await asyncio.shield(launch)
        watching = _task(self._watch(life))
        serving = _task(self._serve(life))
        await asyncio.wait([serving, watching], timeout=self._spec.setup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        failure = self._failure(life, serving, watching)
        if failure is None:
            return self._info
        serving.cancel()
        if not self._stopping:
            self._info = replace(self._info, state=ServerState.FAILED, reason=failure.message)
            await life.end()
        raise failure

    async def _serve(self, life: ServerIncarnation) -> None:
        async with SGLangClient(ServerKeys.read_file(self._spec.keys)) as client:
            await life.wait_answers(client)
            self._info = replace(self._info, state=ServerState.STALE)
            held = await life.generate(client)
        if held != life.weight_version:
            raise ServerError(f"it generates with weight version {held}, not {life.weight_version}")
        self._info = replace(self._info, state=ServerState.READY, weight_version=held)

    def _failure(
        self, life: ServerIncarnation, serving: asyncio.Task[None], watching: asyncio.Task[ServerExit]
    ) -> ServerError | None:
        """Why `life` is not READY; None where it is."""
        if watching.done():
            end = watching.result()
            if self._stopping:
                return life.why_not_ready("it was stopped")
            how = "" if end.exit_code is None else f" with {exit_words(end.exit_code)}"
            return life.why_not_ready(f"it, or a part of it, ended{how}")
        error = serving.exception() if serving.done() else None
        if not serving.done() or (isinstance(error, RequestFailed) and error.kind == "timeout"):
            return life.why_not_ready(f"no generation within {self._spec.setup_timeout_s:g} s")
        if error is None:
            return None
        return life.why_not_ready(error.message if isinstance(error, LauncherError) else repr(error))

    async def _watch(self, life: ServerIncarnation) -> ServerExit:
        """Take the life's end into `info`, unless a later life has begun."""
        end = await life.wait_exit()
        if self._info.generation == life.generation and self._info.state not in OVER:
            was_ready = self._info.state is not ServerState.STARTING
            ended = ServerState.DEAD if was_ready else ServerState.FAILED
            self._info = replace(self._info, state=ServerState.STOPPED if self._stopping else ended, reason=end.reason)
        return end


def _task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure is told to those who await it, and is no noise where nobody does."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


@ray.remote
class SGLangServer:
    """An `SGLangProcess` as a Ray actor: its server dies with this worker and with the raylet, so with the run.

    All methods are coroutines on one loop, so `info` answers whatever else is under way.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        index: int,
        entry: tuple[str, ...] | None = None,
        seats: tuple[Any, ...] = (),
    ) -> None:
        """`seats`: the actors of the other nodes, where it spans several."""
        die_with_raylet()
        hold_lease(lease_of(config))
        self._config = config
        spec = ServerSpec(
            index=index,
            config=config.sglang,
            log=paths.server_log(index),
            keys=paths.keys / SERVERS,
            setup_timeout_s=config.rollout.setup_timeout,
            gpu_ids=tuple(map(str, ray.get_gpu_ids())),
            entry=entry,
            node=this_node(),
        )
        owners = [os.getpid(), raylet_pid()]
        self._process = SGLangProcess(
            spec,
            owners=tuple(pid for pid in owners if pid is not None),
            seats=WorkerNodes.of(seats),
        )
        self._sight = RemoteProcessProbe()
        self._kills = OomKillWatch()

    async def start(
        self, *, generation: int, model_path: str, weight_version: int, overrides: Overrides | None = None
    ) -> ServerInfo:
        """`overrides`: settings that gave way since the run was configured."""
        config = with_overrides(self._config, overrides or {}).sglang
        self._process.configure(replace(config, host=listening_address(config.host)))
        return await self._process.start(generation=generation, model_path=model_path, weight_version=weight_version)

    async def wait_ready(self) -> ServerInfo:
        return await self._process.wait_ready()

    async def wait_exit(self) -> ServerExit:
        ended = await self._process.wait_exit()
        return replace(ended, oom_kills=self._kills.risen())

    async def look(self, pid: int) -> RemoteObservation:
        """At the processes of a life, for a HealthMonitor on another node, which can't."""
        return self._sight.look(pid)

    async def confirm_weights(self, weight_version: int) -> ServerInfo:
        return await self._process.confirm_weights(weight_version)

    async def stop(self) -> ServerInfo:
        return await self._process.stop()

    async def info(self) -> ServerInfo:
        found = self._process.info()
        if found.state not in OVER:
            self._kills.look()
        return found
