"""A checkpoint: its name, the content of its manifest, and whether its files match the manifest; all of a folder.

AReaL's layout (docs/files.md): `epoch{e}epochstep{s}globalstep{g}`, all from 0, `g` the step that was just completed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.base.errors import CheckpointError, DiskError
from launcher.checkpoints.manifest import (
    FAULT_HINT,
    KEEP_MARK,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    find_faults,
    list_files,
)
from launcher.config.fingerprint import Fingerprint

READ_HINT = "look at its disk; to go on without the checkpoint, move its folder away"

_NAME = re.compile(r"epoch(\d+)epochstep(\d+)globalstep(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointName:
    """The completed step that a checkpoint holds; its text is the folder's name. Ordered by `global_step`."""

    global_step: int
    epoch: int
    epoch_step: int

    def __str__(self) -> str:
        return f"epoch{self.epoch}epochstep{self.epoch_step}globalstep{self.global_step}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name that `text` is, or None."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        epoch, epoch_step, global_step = (int(number) for number in match.groups())
        return cls(epoch=epoch, epoch_step=epoch_step, global_step=global_step)


class CheckpointState(enum.StrEnum):
    """What a folder's manifest says. COMMITTED is a claim, which `verify_checkpoint` checks."""

    COMMITTED = "COMMITTED"
    UNVERIFIED = "UNVERIFIED"  # no manifest: AReaL's own, or anyone's
    DAMAGED = "DAMAGED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as listed, its files not yet looked at. `manifest` is there if and only if COMMITTED. `path`: of a
    copy at a URL within its file system."""

    path: Path
    name: CheckpointName
    state: CheckpointState
    manifest: Manifest | None = None
    keep: bool = False
    problem: str = ""

    @property
    def global_step(self) -> int:
        return self.name.global_step

    @property
    def config_fingerprint(self) -> Fingerprint:
        """Of the settings that it was made with; empty where no manifest says so."""
        return {} if self.manifest is None else self.manifest.config_fingerprint

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """As its manifest has them; none where it has none."""
        return {} if self.manifest is None else self.manifest.files

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestComplete:
    """The newest checkpoint that was verified complete (None: there is none). `skipped`: why newer ones were not."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def read_checkpoint(path: Path, name: CheckpointName) -> Checkpoint:
    """What the manifest of a folder says, without looking at its files. Never raises: the state says what is wrong."""
    try:
        manifest = Manifest.read(path)
        if manifest.global_step != name.global_step:
            raise CheckpointError(f"{path / MANIFEST_NAME} is of step {manifest.global_step}", FAULT_HINT)
    except CheckpointError as error:
        state, problem = _why_not(path, error)
        return Checkpoint(path=path, name=name, state=state, problem=problem)
    return Checkpoint(
        path=path, name=name, state=CheckpointState.COMMITTED, manifest=manifest, keep=(path / KEEP_MARK).exists()
    )


def _why_not(path: Path, error: CheckpointError) -> tuple[CheckpointState, str]:
    if (path / MANIFEST_NAME).exists():
        return CheckpointState.DAMAGED, error.message
    if not any(path.glob("*")):
        return CheckpointState.DAMAGED, f"{path} is empty"
    return (
        CheckpointState.UNVERIFIED,
        f"{path} has no {MANIFEST_NAME}: not a checkpoint of ours, nothing vouches for it",
    )


def verify_checkpoint(path: Path) -> tuple[str, ...]:
    """Verify that every file is there, in its length, with its hash, as the manifest on disk says now.

    Returns the names of files that the manifest does not list: harmless, since nothing of ours reads them.
    Raises CheckpointError naming the file and what is wrong with it.
    """
    manifest = _manifest_of(path)
    if faults := find_faults(path, manifest.files):
        raise CheckpointError(faults[0].text, FAULT_HINT)
    found = {file.relative_to(path).as_posix() for file in list_files(path)}
    return tuple(sorted(found - manifest.files.keys()))


def check_checkpoint_sizes(path: Path) -> None:
    """The cheap half of `verify_checkpoint`: no checksums. Raises CheckpointError."""
    if faults := find_faults(path, _manifest_of(path).files, only_sizes=True):
        raise CheckpointError(faults[0].text, FAULT_HINT)


def refuse_unread(path: Path) -> None:
    """Raises DiskError where the disk gives neither this checkpoint nor any other beside it: then nothing is known of
    it. Where it gives another, what can't be read of this one is damaged."""
    try:
        why = next(filter(None, (why_unread(file) for file in path.rglob("*") if file.is_file())), "")
        others = [other / MANIFEST_NAME for other in path.parent.iterdir() if why and other != path]
        if why and not any(other.is_file() and not why_unread(other) for other in others):
            raise DiskError(why, READ_HINT)
    except OSError as error:
        raise DiskError(f"{path} can't be read: {error.strerror or error}", READ_HINT) from error


def why_unread(file: Path) -> str:
    """Why the disk does not give a file that is there; "" where it does."""
    try:
        with file.open("rb", buffering=0) as opened:
            opened.read(1)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{file} can't be read: {error.strerror or error}"
    return ""


def _manifest_of(path: Path) -> Manifest:
    name = CheckpointName.parse(path.name)
    if name is None:
        return Manifest.read(path)  # one that was set aside has another name
    checkpoint = read_checkpoint(path, name)
    if checkpoint.manifest is None:
        raise CheckpointError(checkpoint.problem, FAULT_HINT)
    return checkpoint.manifest


def list_folder(root: Path) -> tuple[Checkpoint, ...]:
    """All below `root`, the newest last; none where there is no such folder. Raises DiskError where it can't be read:
    that is not the same as none."""
    found = []
    try:
        for path in root.iterdir():
            name = CheckpointName.parse(path.name.partition(".")[0])
            if name is None or not path.is_dir():
                continue
            one = read_checkpoint(path, name)
            if not path.is_dir():
                continue  # a live run prunes while others read: what is gone by now was not damaged
            if one.state is CheckpointState.DAMAGED:
                refuse_unread(path)
            found.append(one)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not root.exists():
            return ()
        raise DiskError(f"{root} can't be listed: {error.strerror or error}", "check cluster.fileroot") from error
    return tuple(sorted(found, key=lambda one: (one.name, one.path)))
