"""One SGLang server through all its incarnations: start, wait until ready, watch and judge, stop.

`SGLangProcess` is the plain class; `SGLangServer` is the Ray actor around it, whose server ends with its worker and
its raylet.

    start ─► STARTING ─► STALE ─► READY ─► DEAD       ended by itself
                 │ answers │ generates     STOPPED    by request
                 └─────────┴────────────► FAILED     never became READY

READY means that it generated tokens, and that they came from the weight version asked for. Later versions are
confirmed to the trainer's pool (actors/rollout/server_pool.py).

`start` and `stop` act; `wait_ready` waits for the server's answers; `report` answers when its state, its verdict or its
end changes, of which its host tells within milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import ray

from actors.cluster.fencing import bind_to_cluster, raylet_pid
from actors.cluster.node_identity import listening_address, this_node
from actors.cluster.server_gpus import ServerGpus
from actors.processes.long_poll import hold_answer
from actors.serving.group_address import group_address
from actors.serving.server_incarnation import (
    LaunchOrder,
    ReadinessProof,
    ServerHost,
    ServerIncarnation,
    ServerSpec,
    exit_words,
)
from actors.serving.server_report import ServerReport, ServerWork, verdict_on
from actors.serving.server_watch import ServerWatch
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import LauncherError, RequestFailed, ServerError
from launcher.base.messages import Overrides, ServerExit, ServerInfo, ServerState, Verdict
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.policy.memory_backoff import with_overrides
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
        explain: Callable[[ServerExit], Awaitable[ServerExit]] | None = None,
    ) -> None:
        """`host`: one that forks others than SGLang's. `explain` adds to an end what its machine knows of it."""
        self._spec = spec
        self._owners = owners
        self._host = host or ServerHost(within_s=spec.setup_timeout_s)
        self._explain = explain
        self._info = ServerInfo(
            name=spec.name, index=spec.index, generation=-1, state=ServerState.STOPPED, node=spec.node
        )
        self._launch: asyncio.Task[ServerIncarnation] | None = None
        self._ready: asyncio.Task[ServerInfo] | None = None
        self._ending: asyncio.Task[ServerExit] | None = None
        self._end: ServerExit | None = None
        self._ended_at = 0.0
        self._watch: ServerWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._stopped: set[int] = set()  # generations that were told to stop
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()

    def info(self) -> ServerInfo:
        """As last known."""
        return self._info

    async def report(self, work: ServerWork, hold_s: float = 0.0) -> ServerReport:
        """When something has changed since the last report, at once where another asks, else after `hold_s`."""
        if self._watch is not None and work.generation == self._info.generation:
            self._watch.take_work(work)
        await hold_answer(self._changed, hold_s)
        return self._report(work.generation)

    def _report(self, ordered: int) -> ServerReport:
        return ServerReport(
            ordered=ordered,
            info=self._info,
            verdict=self._verdict(),
            end=None if self._end is None else self._end.aged(time.monotonic() - self._ended_at),
            blind="" if self._watch is None else self._watch.blind,
        )

    def _verdict(self) -> Verdict | None:
        if self._watch is None or self._stopping:
            return None
        return self._watch.verdict() if self._end is None else verdict_on(self._end)

    def _take_info(self, info: ServerInfo) -> None:
        self._info = info
        self._changed.set()

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
        self._end_watch()
        self._end = self._watch = None
        self._take_info(
            ServerInfo(
                name=self._spec.name,
                index=self._spec.index,
                generation=generation,
                state=ServerState.STARTING,
                node=self._spec.node,
            )
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
        await asyncio.shield(self._launch)
        assert self._ending is not None
        return await asyncio.shield(self._ending)

    async def stop(self) -> ServerReport:
        """End the process tree; returns when it is gone and its port is free, with its end. Harmless at any time."""
        self._stopping = True
        launch, generation = self._launch, self._info.generation
        self._stopped.add(generation)
        if launch is not None:
            self._host.stop_waiting()
            await asyncio.wait([launch])
            if launch.exception() is None:
                ending = self._ending
                await launch.result().end()
                if ending is not None:
                    await asyncio.wait([ending])
        if self._info.generation == generation:  # else the next one was started meanwhile: it is not what is stopped
            self._take_info(replace(self._info, state=ServerState.STOPPED, reason="told to stop"))
        return self._report(generation)

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
            self._take_info(replace(self._info, state=ServerState.FAILED, reason=error.message))
            raise
        self._take_info(replace(self._info, url=server.url, pid=server.pid))
        self._ending = _task(self._note_end(server))
        return server

    async def _become_ready(self, launch: asyncio.Task[ServerIncarnation]) -> ServerInfo:
        server = await asyncio.shield(launch)
        ending = self._ending
        assert ending is not None
        serving = _task(self._serve(server))
        await asyncio.wait([serving, ending], timeout=self._spec.setup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        failure = self._failure(server, serving, ending)
        if failure is None:
            self._watching = _task(self._judge(self._info, *serving.result()))
            return self._info
        serving.cancel()
        if not self._stopping:
            self._take_info(replace(self._info, state=ServerState.FAILED, reason=failure.message))
            await server.end()
        raise failure

    async def _serve(self, server: ServerIncarnation) -> tuple[ServerKeys, float]:
        """Until it has generated. Returns the keys that it takes, and the seconds of its first generation."""
        keys = ServerKeys.read_file(self._spec.keys)
        async with SGLangClient(keys) as client:
            await server.wait_answers(client)
            self._take_info(replace(self._info, state=ServerState.STALE, reason=FIRST_GENERATION))
            asked_at = time.monotonic()
            held = await server.generate(client)
            first_answer_s = time.monotonic() - asked_at
        if held != server.weight_version:
            raise ServerError(f"it generates with weight version {held}, not {server.weight_version}")
        self._take_info(replace(self._info, state=ServerState.READY, weight_version=held, reason=""))
        return keys, first_answer_s

    async def _judge(self, info: ServerInfo, keys: ServerKeys, first_answer_s: float) -> None:
        """Of one that is READY, until it has ended."""
        async with SGLangClient(keys) as client:
            self._watch = ServerWatch(
                info, self._spec.health, client, first_answer_s=first_answer_s, changed=self._changed.set
            )
            await self._watch.run()

    def _failure(
        self,
        server: ServerIncarnation,
        serving: asyncio.Task[tuple[ServerKeys, float]],
        ending: asyncio.Task[ServerExit],
    ) -> ServerError | None:
        """Why `server` is not READY; None where it is."""
        if ending.done():
            end = ending.result()
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

    async def _note_end(self, server: ServerIncarnation) -> ServerExit:
        """Record the end of an incarnation, unless a later one has begun."""
        end = await server.wait_exit()
        if self._explain is not None and not end.was_told:
            end = await self._explain(end)
        end = replace(end, was_told=end.was_told and end.generation in self._stopped)  # not where it was given up here
        if self._info.generation == server.generation:
            self._end_watch()
            self._end = end
            self._ended_at = time.monotonic()
            if self._info.state not in OVER:
                was_ready = self._info.state is not ServerState.STARTING
                ended = ServerState.DEAD if was_ready else ServerState.FAILED
                self._info = replace(
                    self._info, state=ServerState.STOPPED if self._stopping else ended, reason=end.reason
                )
            self._changed.set()
        return end

    def _end_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()


def _task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error is raised where it is awaited, and not logged where it isn't."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


@ray.remote
class SGLangServer:
    """An `SGLangProcess` as a Ray actor: its server ends with this worker and with the raylet, so with the run.

    All methods are coroutines on one loop, so `report` always answers.
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
            health=config.health,
        )
        owners = [os.getpid(), raylet_pid()]
        self._process = SGLangProcess(
            spec,
            owners=tuple(pid for pid in owners if pid is not None),
            explain=self._explain,
        )
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
        self._kills = OomKillWatch()  # a kill of the incarnation before must not explain the end of this one
        self._process.configure(replace(config, host=listening_address(config.host)))
        return await self._process.start(generation=generation, model_path=model_path, weight_version=weight_version)

    async def wait_ready(self) -> ServerInfo:
        return await self._process.wait_ready()

    async def report(self, work: ServerWork, hold_s: float = 0.0) -> ServerReport:
        if self._process.info().state not in OVER:
            self._kills.note_count()
        return await self._process.report(work, hold_s)

    async def stop(self) -> ServerReport:
        return await self._process.stop()

    async def _explain(self, end: ServerExit) -> ServerExit:
        oom_kills = self._kills.risen()  # before NVML is waited for: each report meanwhile looks again, and forgets it
        return replace(await self._gpus.explained(end), oom_kills=oom_kills)
