"""New weights to every server, each confirming the version before it gets traffic (P3).

`disk`: a Hugging Face folder in memory-backed storage, written once and loaded by every server; it also is what a
restarted server starts from. `tensor`: over the wire to servers on this node, with no copy on any disk.
A server that refuses, or misses its deadline, becomes STALE and does not hold up the others.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.server_pool import ServerPool
from actors.sglang_client import SGLangClient
from launcher.errors import ServerError, WeightsRefused
from launcher.messages import ServerInfo, ServerState

KEPT_VERSIONS = 2
"""Folders that stay: the one being served, and the one that servers may still be reading."""

NamedWeights = Mapping[str, torch.Tensor]


class WeightFolders:
    """`{root}/v{version}`: whole Hugging Face folders, each appearing under its name only when complete."""

    def __init__(self, root: Path, model_path: Path) -> None:
        self._root = root
        self._model_path = model_path
        shutil.rmtree(root, ignore_errors=True)  # what an earlier attempt was killed over
        root.mkdir(parents=True, mode=0o700)

    def write(self, weights: NamedWeights, version: int) -> Path:
        folder = self._root / f"v{version}"
        staged = self._root / f".v{version}"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        staged.mkdir()
        for file in self._model_path.iterdir():
            if file.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in file.name:
                shutil.copyfile(file, staged / file.name)
        save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, staged / "model.safetensors")
        staged.rename(folder)
        return folder

    def forget_before(self, version: int) -> None:
        for folder in self._root.glob("v*"):
            if int(folder.name[1:]) <= version - KEPT_VERSIONS:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


class WeightPublisher:
    """Publishes to the servers of a pool and tells the pool what each one confirmed."""

    def __init__(
        self, client: SGLangClient, pool: ServerPool, folders: WeightFolders | None, *, timeout_s: float
    ) -> None:
        self._client = client
        self._pool = pool
        self._folders = folders
        self._timeout_s = timeout_s

    async def publish(self, weights: Callable[[], NamedWeights], version: int) -> None:
        """Send `weights` as `version` to all servers side by side.

        Raises WeightsRefused where no server at all took them; one alone that did not is STALE.
        """
        tensors = await asyncio.to_thread(weights)
        folder = None if self._folders is None else await asyncio.to_thread(self._folders.write, tensors, version)
        servers = [s for s in self._pool.servers() if s.state not in {ServerState.DEAD, ServerState.STOPPED}]
        taken = await asyncio.gather(*(self._send(server, tensors, folder, version) for server in servers))
        if self._folders is not None:
            self._folders.forget_before(version)
        if not any(taken):
            raise WeightsRefused(
                f"no server took weight version {version}: "
                + "; ".join(f"{s.name}: {s.reason}" for s in self._pool.servers()),
                "see llm_server-<i>.log; actor.weight_update_timeout is each server's deadline",
            )

    async def _send(self, server: ServerInfo, tensors: NamedWeights, folder: Path | None, version: int) -> bool:
        await self._pool.mark_stale(server.name, f"loading weight version {version}")
        try:
            if folder is not None:
                await self._client.update_weights_from_disk(
                    server.url, path=folder, weight_version=version, timeout_s=self._timeout_s
                )
            else:
                await self._client.update_weights_from_tensor(
                    server.url, named_tensors=tensors, weight_version=version, timeout_s=self._timeout_s
                )
        except ServerError as error:
            await self._pool.mark_stale(server.name, error.message)
            return False
        await self._pool.confirm(server.name, version)
        return True
