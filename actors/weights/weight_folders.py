"""Folders of weights in memory-backed storage, from which servers load, and a restarted one starts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Set
from pathlib import Path

from actors.serving.sglang_client import SGLangClient
from actors.weights.weight_transports import Send, WeightTransport
from launcher.base.errors import WeightsRefused
from launcher.base.messages import PublishedWeights

KEPT_VERSIONS = 2
"""Folders that stay: the one being served, and the one that servers may still be reading."""


class WeightFolders:
    """`{root}/v{version}`: Hugging Face folders, each appearing under its name only when complete."""

    def __init__(self, root: Path, export: Callable[[Path], None], *, keeps: bool = False) -> None:
        """`export` writes a model folder into an existing empty one. `keeps`: what is there is not removed."""
        self._root = root
        self._export = export
        self.newest_bytes = 0  # of the last folder that was written; 0 before the first
        if not keeps:
            shutil.rmtree(root, ignore_errors=True)  # left by an earlier attempt that was killed
        root.mkdir(parents=True, mode=0o700, exist_ok=keeps)

    @property
    def parent(self) -> Path:
        """What has to have room."""
        return self._root.parent

    def write(self, version: int) -> Path:
        """Raises WeightsRefused where the folder can't be written."""
        folder = self._root / f"v{version}"
        staged = self._root / f".v{version}"
        for leftover in (staged, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            staged.mkdir()
            self._export(staged)
            self.newest_bytes = sum(file.stat().st_size for file in staged.iterdir())
            return staged.rename(folder)
        except OSError as error:
            raise WeightsRefused(
                f"weight version {version} can't be written to {folder}: {error.strerror or error}",
                f"make room in the file system of {self._root.parent}",
            ) from error
        finally:  # whatever the error: half a folder takes memory, of which there may be too little
            shutil.rmtree(staged, ignore_errors=True)

    def have(self, version: int) -> Path:
        """The folder of a version, written where it doesn't exist yet. Raises WeightsRefused."""
        folder = self._root / f"v{version}"
        return folder if folder.is_dir() else self.write(version)

    def forget_all(self) -> None:
        """After a restore the same version numbers mean other weights."""
        for folder in self._root.glob("v*"):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_before(self, version: int, *, spare: Set[int] = frozenset()) -> None:
        """`spare`: versions that some server is still reading, however late."""
        for folder in self._root.glob("v*"):
            if int(folder.name[1:]) <= version - KEPT_VERSIONS and int(folder.name[1:]) not in spare:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


class FolderTransport(WeightTransport):
    """Each server loads the same folder; a restarted one starts from it."""

    def __init__(
        self,
        client: SGLangClient,
        folders: WeightFolders,
        *,
        timeout_s: float,
        newest: PublishedWeights | None = None,
    ) -> None:
        """`newest`: where there is one from before."""
        self._client = client
        self._folders = folders
        self._timeout_s = timeout_s
        self.newest = newest

    async def prepare(self, version: int, lineage: int) -> Send:
        folder = await asyncio.to_thread(self._folders.have, version)
        self.newest = PublishedWeights(path=str(folder), version=version, lineage=lineage)
        return lambda server: self._client.update_weights_from_disk(
            server.url, path=folder, weight_version=version, timeout_s=self._timeout_s
        )

    def published(self, version: int, *, reading: Set[int]) -> None:
        self._folders.forget_before(version, spare=reading)

    def forget_all(self) -> None:
        super().forget_all()
        self._folders.forget_all()
