"""The door of another project's trainer as a Ray actor: its addresses outlive servers, the trainer, and itself.

Ray restarts it when its process ends. It then listens on the ports that it had, with the weights and the pause that its
files name; the Coordinator gives it its servers again.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.cluster.fencing import bind_to_cluster
from actors.cluster.node_identity import listening_address, this_node
from actors.foreign.completion_counts import CompletionCounts
from actors.foreign.door_http import DoorHttp
from actors.foreign.door_requests import DoorRequests
from actors.foreign.door_servers import DoorServers
from actors.foreign.kept_weights import LINEAGE, KeptWeights
from actors.processes.background_tasks import BackgroundTasks
from launcher.base.errors import WeightsRefused
from launcher.base.messages import ServerInfo, TrainerView
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths

DOOR = "door"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    journal: Journal
    kept: KeptWeights
    servers: DoorServers
    requests: DoorRequests
    http: DoorHttp


@ray.remote
class DoorActor:
    """Nothing in `__init__` can fail: an actor whose constructor raises is never restarted. Each method begins it."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        bind_to_cluster(config)
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._made: _Parts | None = None
        self._told = ""
        self._beginning = asyncio.Lock()
        self._tasks = BackgroundTasks()

    async def _begun(self) -> _Parts:
        async with self._beginning:
            if self._made is None:
                self._made = await self._begin()
        return self._made

    async def _begin(self) -> _Parts:
        config, paths = self._config, self._paths
        journal = Journal(paths.events, self._attempt, time.time, in_background=True)
        keys = await asyncio.to_thread(ServerKeys.read, paths.keys)
        kept = await asyncio.to_thread(_kept, paths.kept_weights(self._attempt))
        servers = DoorServers(config, keys, kept)
        requests = DoorRequests(
            servers, config.rollout, lambda event, server, reason: journal.record(event, subject=server, reason=reason)
        )
        told: set[str] = set()

        def tell(path: str) -> None:
            if path not in told:
                told.add(path)
                journal.record("door.refused", subject=DOOR, reason=f"{path}: weights come from the disk alone")

        http = DoorHttp(servers, requests, kept, told=tell)
        try:
            await http.open(listening_address(config.sglang.host), config.sglang.n_servers)
        except OSError:  # one of its ports is taken meanwhile: the next call tries all of them again
            await http.close()
            await servers.close()
            raise
        gc.freeze()  # what lives as long as the process is not looked through again and again
        journal.record("door.opened", subject=DOOR, reason=", ".join(http.addresses), pid=os.getpid())
        return _Parts(journal=journal, kept=kept, servers=servers, requests=requests, http=http)

    # ── for the command (command_trainer.py) ──

    async def addresses(self) -> Sequence[str]:
        return (await self._begun()).http.addresses

    async def new_client(self, from_first: bool) -> None:
        """Another incarnation of the trainer begins: nothing of the one before is paused. `from_first`: it begins with
        the model's own weights, and so must the servers."""
        made = await self._begun()
        await made.kept.note_in_turn(paused="")
        await made.requests.resume()
        if from_first and made.servers.version > 0:
            self._tasks.start(self._give_first_weights(made))

    async def _give_first_weights(self, made: _Parts) -> None:
        try:
            await made.servers.update(Path(self._config.sglang.model_path))
        except WeightsRefused as error:  # SGLang starts from formats that it is not sent in
            reason = f"{error.message}: until its first update, the trainer is answered with weights of the one before"
            made.journal.record("door.refused", subject=DOOR, reason=reason)

    async def completions(self) -> CompletionCounts:
        return (await self._begun()).requests.completions

    # ── for the Coordinator, as the trainer's ──

    async def view(self) -> TrainerView:
        made = await self._begun()
        self._tasks.check()
        made.journal.write_waiting()
        servers = made.servers
        if servers.waits_for not in ("", self._told):
            self._told = servers.waits_for
            reason = f"the trainer waits until its new weights can be loaded: {self._told}"
            made.journal.record("door.refused", subject=DOOR, reason=reason)
        return TrainerView(
            pid=os.getpid(),
            node=this_node(),
            is_started=True,
            is_loaded=True,
            phase="publish" if servers.is_publishing else "serve",
            busy=servers.waits_for,
            progress=servers.pool.released,
            lineage=LINEAGE,
            policy_version=servers.version,
            weights=servers.publisher.newest,
            servers=servers.pool.servers(),
            in_flight=servers.pool.in_flight(),
            loading=servers.publisher.loading(),
        )

    async def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        await (await self._begun()).servers.set_servers(servers)

    async def limit_rollouts(self, max_concurrent: int) -> None:
        """Requests of one sample each, here."""
        await (await self._begun()).servers.pool.limit(max_concurrent * self._config.gconfig.n_samples)

    async def send_weights(self, server: ServerInfo, _: int) -> int:
        return await (await self._begun()).servers.send_weights(server)

    async def admit(self, server: ServerInfo) -> float | None:
        return await (await self._begun()).servers.admit(server)

    async def drain_server(self, name: str, within_s: float) -> int:
        return await (await self._begun()).servers.pool.drain(name, within_s=within_s)

    async def close(self) -> None:
        """At the end of the run."""
        made = await self._begun()
        counts = made.requests.counts
        facts = {"requests": counts.requests, "moved": counts.moved, "continued": counts.continued}
        made.journal.record("door.closed", subject=DOOR, reason="the run ends", **facts)
        await made.http.close()
        await self._tasks.close()
        await made.servers.close()
        await made.journal.flush()
        await asyncio.to_thread(shutil.rmtree, self._paths.kept_weights(self._attempt), ignore_errors=True)


def _kept(root: Path) -> KeptWeights:
    """Without those of earlier attempts, whose trainer has ended."""
    for earlier in root.parent.glob("attempt-*"):
        if earlier.name.partition(".")[0] != root.name:
            shutil.rmtree(earlier, ignore_errors=True)
    return KeptWeights(root)
