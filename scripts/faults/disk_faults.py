"""Faults of the disk: a damaged checkpoint (T4), a filesystem without room (T5)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.base.errors import CheckpointError, UsageError
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.manifest import MANIFEST_NAME, list_files
from launcher.run_files.run_paths import RunPaths
from scripts.faults import signals
from scripts.faults.declaration import FaultContext, Figures, Option, fault, seconds
from scripts.faults.run_processes import RunProcesses
from scripts.faults.signals import Missed

SMALL_DISK_BYTES = 2 * 2**30
CHUNK = 2**20


def complete_checkpoints(paths: RunPaths, *, enough: int) -> list[Checkpoint]:
    """The newest complete ones, verified by their hashes; stops when there are `enough`."""
    store = CheckpointStore(paths.default_checkpoints)
    found: list[Checkpoint] = []
    for checkpoint in reversed(store.list()):
        if len(found) >= enough:
            break
        if checkpoint.state is not CheckpointState.COMMITTED:
            continue
        with contextlib.suppress(CheckpointError):
            store.verify(checkpoint)
            found.append(checkpoint)
    return found


def damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; returns what was done, exactly enough to undo a flip."""
    if how == "manifest":
        (folder / MANIFEST_NAME).unlink()
        return f"{MANIFEST_NAME} was removed"
    file = max(list_files(folder), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    if how == "torn":
        os.truncate(file, size // 2)
        return f"{file.name} was cut from {size} to {size // 2} bytes"
    with file.open("r+b") as opened:
        opened.seek(size // 2)
        byte = opened.read(1)[0]
        opened.seek(size // 2)
        opened.write(bytes([byte ^ 1]))
    return f"bit 0 of byte {size // 2} of {file.name} was flipped"


@fault(
    "T4",
    "newest checkpoint damaged, then T1",
    role="trainer",
    damage=Option(
        "flip",
        "torn: its largest file cut in half; flip: one bit of it; manifest: gone",
        ("torn", "flip", "manifest"),
    ),
    then=Option("kill", "nothing: leave the trainer alone", ("kill", "nothing")),
)
def damage_checkpoint(context: FaultContext) -> Figures:
    trainer = context.trainer()
    (newest, *_) = complete_checkpoints(context.paths, enough=1) or (None,)
    if newest is None:
        raise Missed("there is no complete checkpoint", "wait for the first")
    figures: Figures = {"target": str(newest), "damage": damage(newest.path, context.word("damage"))}
    return figures | (signals.kill([trainer]) if context.word("then") == "kill" else {})


def large_disk(folder: Path) -> str:
    """Why the filesystem of `folder` must not be filled; empty where it may: it is small, and not the machine's own."""
    usage, device = shutil.disk_usage(folder), folder.stat().st_dev
    if device == Path("/").stat().st_dev:
        return f"{folder} lies on the machine's own filesystem"
    if usage.total > SMALL_DISK_BYTES:
        return f"the filesystem of {folder} has {usage.total / 2**30:.0f} GiB, more than {SMALL_DISK_BYTES / 2**30:.0f}"
    return ""


def check_small_disk(paths: RunPaths, found: RunProcesses) -> None:
    """Raises UsageError with how to make one."""
    if why := large_disk(paths.default_checkpoints):
        raise UsageError(
            f"T5 fills a disk, and {why}",
            "before the run: mount -t tmpfs -o size=64m tmpfs <fileroot>/checkpoints, or give it a small fileroot",
        )


@contextlib.contextmanager
def full_disk(folder: Path, *, free_bytes: int) -> Iterator[int]:
    """Within the block no more than `free_bytes` are free; yields the size of the file that takes the rest."""
    ballast = folder / f".ballast-{os.getpid()}"
    try:
        with ballast.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):  # full a little earlier than the filesystem reported: what was wanted
                while (room := shutil.disk_usage(folder).free - free_bytes) > 0:
                    file.write(b"\0" * min(room, CHUNK))
            size = os.fstat(file.fileno()).st_size
        yield size
    finally:
        ballast.unlink(missing_ok=True)


@fault(
    "T5",
    "disk full: a file takes what is free where the checkpoints lie; on a small filesystem alone",
    role="trainer",
    check=check_small_disk,
    free_kib=Option(64.0, "that stay free"),
    seconds=seconds(60.0, "then it is removed"),
)
def fill_disk(context: FaultContext) -> Figures:
    check_small_disk(context.paths, context.found)  # again: much may have been mounted since the command
    folder = context.paths.default_checkpoints
    with full_disk(folder, free_bytes=int(context.number("free_kib") * 1024)) as size:
        context.sleep(context.number("seconds"))
    return {"target": str(folder), "ballast_bytes": size}
