"""The weights that another project's trainer has given its servers, kept until newer ones come.

The trainer removes its folder once it is told that it was loaded; a server that is restarted later needs it. Files are
hard-linked, which takes neither time nor room, and copied where that is another file system, or where the trainer
writes into the files that it gave before.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from actors.weights.weight_folders import WeightFolders
from launcher.base.durable import replace_file
from launcher.base.errors import ModelError, WeightsRefused
from launcher.base.messages import PublishedWeights
from launcher.checkpoints.tensor_files import read_entries

LINEAGE = 1
"""Versions are never used again for other weights here."""
STATE = "door.json"
TENSORS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorState:
    """What a door that replaces a killed one has to know. `taken`: the files that the newest version was made of, with
    sizes and times; `source`: their folder. `serves`: a server has answered once. `paused`: as the trainer asked."""

    ports: list[int] = field(default_factory=list)
    version: int = 0
    source: str = ""
    taken: list[list[object]] = field(default_factory=list)
    serves: bool = False
    paused: str = ""
    copies: bool = False


class KeptWeights:
    """Folders `v<version>` below `root`, the newest two, and the door's state beside them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._source = root
        self.folders = WeightFolders(root, self._fill, keeps=True)
        self.state = self._read()
        self._writing = threading.Lock()  # else a version that is taken on a thread undoes a pause of that moment
        self._turn = asyncio.Lock()  # it wakes in the order of arrival, and `_writing` does not

    def _read(self) -> DoorState:
        try:
            return DoorState(**json.loads((self._root / STATE).read_text()))
        except (OSError, ValueError, TypeError):  # none yet: it is replaced in one piece
            return DoorState()

    def note(self, **changes: object) -> None:
        """Raises OSError. A crash of the machine ends the run's attempt, and what this is for."""
        with self._writing:
            made = replace(self.state, **changes)  # type: ignore[arg-type]
            if made != self.state:
                replace_file(self._root / STATE, json.dumps(asdict(made)).encode(), durable=False)
                self.state = made

    async def note_in_turn(self, **changes: object) -> None:
        """`note` on a thread, since a disk may stall; in the order of the calls. Raises OSError."""
        async with self._turn:
            await asyncio.to_thread(self.note, **changes)

    @property
    def newest(self) -> PublishedWeights | None:
        """None before the first."""
        folder = self._root / f"v{self.state.version}"
        if not folder.is_dir():
            return None
        return PublishedWeights(path=str(folder), version=self.state.version, lineage=LINEAGE)

    def has(self, source: Path) -> bool:
        """Whether the newest version was made of the files that are there now, or that were there last."""
        if str(source) != self.state.source:
            return False
        return not source.exists() or contents(source) == self.state.taken

    def take_weights(self, source: Path) -> int:
        """Keep a folder as the next version, which this returns. Raises WeightsRefused where it can't be loaded."""
        if problem := problem_with(source):
            raise WeightsRefused(f"{source}: {problem}")
        self._source = source
        version = self.state.version + 1
        taken = contents(source)
        copies = self.state.copies or self._is_written_again(source)
        if copies:
            self.note(copies=True)
        self.folders.write(version)
        self.note(version=version, source=str(source), taken=taken)
        return version

    def _is_written_again(self, source: Path) -> bool:
        """The trainer has written into the very files that were kept: a link would change with them."""
        kept = {_identity(file) for file in (self._root / f"v{self.state.version}").glob(TENSORS)}
        return any(_identity(file) in kept for file in source.glob(TENSORS))

    def _fill(self, staged: Path) -> None:
        for file in self._source.iterdir():
            if not file.is_file():
                continue
            if self.state.copies:
                shutil.copyfile(file, staged / file.name)
            else:
                _link(file, staged / file.name)


def contents(source: Path) -> list[list[object]]:
    """Name, size and time of each file."""
    found = [(file.name, file.stat()) for file in source.iterdir() if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(found, key=lambda one: one[0])]


def problem_with(source: Path) -> str:
    """Why a server could not load this folder; "" where nothing speaks against it. SGLang dies of a truncated file."""
    try:
        if not (source / "config.json").is_file():
            return "no model is there (config.json)"
        files = sorted(source.glob(TENSORS))
        for file in files:
            read_entries(file)
    except (OSError, ModelError) as error:
        return str(error)
    return "" if files else f"no {TENSORS} is there, and other formats are not loaded"


def _identity(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, target)
