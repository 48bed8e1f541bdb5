"""New weights to every server, each confirming the version before it gets traffic (P3).

`disk`: a Hugging Face folder in memory-backed storage, written once and loaded by every server; it also is what a
restarted server starts from. `tensor`: over the wire to servers on this node, with no copy on any disk.
A server that refuses, or misses its deadline, becomes STALE and does not hold up the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import torch

from actors.server_pool import ServerPool
from actors.sglang_client import SGLangClient
from launcher.errors import ServerError, WeightsRefused
from launcher.messages import PublishedWeights, ServerInfo, ServerState

KEPT_VERSIONS = 2
"""Folders that stay: the one being served, and the one that servers may still be reading."""

OVER = frozenset({ServerState.DEAD, ServerState.STOPPED, ServerState.FAILED})

NamedWeights = Mapping[str, torch.Tensor]
Send = Callable[[str], Awaitable[None]]
"""Sends one version to the server at a url."""


class WeightFolders:
    """`{root}/v{version}`: whole Hugging Face folders, each appearing under its name only when complete."""

    def __init__(self, root: Path, export: Callable[[Path], None]) -> None:
        """`export` writes a model folder into an existing empty one."""
        self._root = root
        self._export = export
        shutil.rmtree(root, ignore_errors=True)  # what an earlier attempt was killed over
        root.mkdir(parents=True, mode=0o700)

    def write(self, version: int) -> Path:
        """Raises WeightsRefused where the folder can't be written."""
        folder = self._root / f"v{version}"
        staged = self._root / f".v{version}"
        for leftover in (staged, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            staged.mkdir()
            self._export(staged)
            return staged.rename(folder)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise WeightsRefused(
                f"weight version {version} can't be written to {folder}: {error.strerror or error}",
                "make room in this machine's shared memory, or set actor.weight_update_mode=tensor",
            ) from error

    def have(self, version: int) -> Path:
        """The folder of a version, written where it does not stand yet. Raises WeightsRefused."""
        folder = self._root / f"v{version}"
        return folder if folder.is_dir() else self.write(version)

    def forget_all(self) -> None:
        """After a restore the same numbers stand for other weights."""
        for folder in self._root.glob("v*"):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_before(self, version: int) -> None:
        for folder in self._root.glob("v*"):
            if int(folder.name[1:]) <= version - KEPT_VERSIONS:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


class WeightPublisher:
    """Publishes to the servers of a pool, and tells the pool what each one confirmed."""

    def __init__(
        self,
        client: SGLangClient,
        pool: ServerPool,
        *,
        folders: WeightFolders | None,
        weights: Callable[[], NamedWeights],
        tp_size: int,
        timeout_s: float,
    ) -> None:
        """`folders` None: over the wire. `weights` are the ones to send then, each server split over `tp_size` GPUs."""
        self._client = client
        self._pool = pool
        self._folders = folders
        self._weights = weights
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._lineage = 0
        self._newest: PublishedWeights | None = None

    @property
    def newest(self) -> PublishedWeights | None:
        """The newest weights that stand in a folder."""
        return self._newest

    def begin(self, lineage: int) -> None:
        """From now on the weights are those after the `lineage`-th restore; folders from before it are others."""
        self._lineage, self._newest = lineage, None
        if self._folders is not None:
            self._folders.forget_all()

    async def publish(self, version: int) -> None:
        """Send the current weights as `version` to all servers side by side.

        Raises WeightsRefused where no server at all took them; one alone that did not is STALE.
        """
        send = self._over_the_wire(version) if self._folders is None else self._from_disk(self._folders, version)
        servers = [server for server in self._pool.servers() if server.state not in OVER]
        taken = await asyncio.gather(*(self._send(server, send, version) for server in servers))
        if self._folders is not None:
            self._folders.forget_before(version)
        if not any(taken):
            raise WeightsRefused(
                f"no server took weight version {version}: "
                + "; ".join(f"{server.name}: {server.reason}" for server in self._pool.servers()),
                "see llm_server-<i>.log; actor.weight_update_timeout is each server's deadline",
            )

    async def prepare(self, version: int) -> Send:
        """Make the current weights ready to be sent as `version`, whatever happens to the model from then on.

        Call it while the weights stand still. Raises WeightsRefused.
        """
        if self._folders is not None:
            return self._from_disk(self._folders, version)
        copies = {name: tensor.clone() for name, tensor in self._weights().items()}
        return self._tensors(copies, version)

    async def send_to(self, server: ServerInfo, send: Send, version: int) -> None:
        """Send what was prepared to one server, which stays without traffic until it is admitted.

        Raises WeightsRefused, RequestFailed.
        """
        lineage = self._lineage
        await self._pool.update([dataclasses.replace(server, state=ServerState.STALE, reason="loading weights")])
        await send(server.url)
        await self._pool.confirm(server.name, version, lineage)

    def _from_disk(self, folders: WeightFolders, version: int) -> Send:
        folder = folders.have(version)
        self._newest = PublishedWeights(path=str(folder), version=version, lineage=self._lineage)
        return lambda url: self._client.update_weights_from_disk(
            url, path=folder, weight_version=version, timeout_s=self._timeout_s
        )

    def _over_the_wire(self, version: int) -> Send:
        return self._tensors(self._weights(), version)

    def _tensors(self, tensors: NamedWeights, version: int) -> Send:
        return lambda url: self._client.update_weights_from_tensor(
            url, named_tensors=tensors, weight_version=version, timeout_s=self._timeout_s, tp_size=self._tp_size
        )

    async def _send(self, server: ServerInfo, send: Send, version: int) -> bool:
        await self._pool.mark_stale(server.name, f"loading weight version {version}")
        try:
            await send(server.url)
        except ServerError as error:
            await self._pool.mark_stale(server.name, error.message)
            return False
        await self._pool.confirm(server.name, version, self._lineage)
        return True
