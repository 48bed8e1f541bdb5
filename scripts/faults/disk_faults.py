"""Faults of the disk: a damaged checkpoint (T4), a filesystem that refuses writes (T5)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.base.errors import CheckpointError, UsageError
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.manifest import MANIFEST_NAME, list_files
from launcher.run_files.run_paths import RunPaths
from scripts.faults import signals
from scripts.faults.declaration import FaultContext, Figures, Option, fault, seconds
from scripts.faults.signals import Missed
from scripts.run_processes import RunProcesses

SMALL_DISK_BYTES = 2 * 2**30
CHUNK = 2**20
AGAIN_S = 0.2
WHERE = ("checkpoints", "logs")


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
        "flip", "torn: its largest file cut in half; flip: one bit of it; manifest: gone", ("torn", "flip", "manifest")
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


def folder_of(paths: RunPaths, where: str) -> Path:
    return paths.logs if where == "logs" else paths.default_checkpoints


def check_small_disk(paths: RunPaths, found: RunProcesses) -> None:
    """One of the folders that may be chosen lies on a small disk. Raises UsageError with how to make one."""
    reasons = [large_disk(folder_of(paths, where)) for where in WHERE]
    if all(reasons):
        raise UsageError(
            f"T5 fills a disk, and {reasons[0]}",
            "before the run: mount -t tmpfs -o size=64m tmpfs <fileroot>/checkpoints, or give it a small fileroot",
        )


@contextlib.contextmanager
def full_disk(folder: Path, *, free_bytes: int) -> Iterator[Callable[[], int]]:
    """Within the block no more than `free_bytes` are free whenever what it yields was called: that takes what is free,
    and returns the size of the file that has it."""
    ballast = folder / f".ballast-{os.getpid()}"
    try:
        with ballast.open("wb", buffering=0) as file:

            def take() -> int:
                with contextlib.suppress(OSError):  # full a little earlier than the filesystem reported
                    while (room := shutil.disk_usage(folder).free - free_bytes) > 0:
                        file.write(b"\0" * min(room, CHUNK))
                return os.fstat(file.fileno()).st_size

            yield take
    finally:
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def no_inodes(folder: Path) -> Iterator[Callable[[], int]]:
    """The same with empty files: there is room, but for no further file."""
    many = folder / f".ballast-{os.getpid()}.d"
    numbers = itertools.count()
    try:
        many.mkdir()

        def take() -> int:
            with contextlib.suppress(OSError):
                while True:
                    (many / str(next(numbers))).touch(exist_ok=False)
            return next(numbers)

        yield take
    finally:
        shutil.rmtree(many, ignore_errors=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Callable[[], int]]:
    """The folder as a second mount of itself, read-only. What is open stays writable: the kernel refuses to change a
    mount with open files, and an error of a real disk is not asked."""
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder))
        yield lambda: 0
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missed(f"mount {' '.join(words)}: {done.stderr.strip()}", "it needs root")


@fault(
    "T5",
    "disk full, without inodes or read-only where the checkpoints or the logs lie; on a small filesystem alone",
    role="trainer",
    check=check_small_disk,
    where=Option("checkpoints", "which of the run's folders", WHERE),
    how=Option("full", "inodes: room, but for no further file; read_only: mounted so", ("full", "inodes", "read_only")),
    free_kib=Option(64.0, "that stay free"),
    seconds=seconds(60.0, "then it is as before"),
)
def fill_disk(context: FaultContext) -> Figures:
    folder, how = folder_of(context.paths, context.word("where")), context.word("how")
    if why := large_disk(folder):  # chosen just now; and much may have been mounted since the command
        raise Missed(why, "mount a small filesystem there before the run")
    broken = {
        "full": lambda: full_disk(folder, free_bytes=int(context.number("free_kib") * 1024)),
        "inodes": lambda: no_inodes(folder),
        "read_only": lambda: read_only(folder),
    }
    ends_at, taken = time.monotonic() + context.number("seconds"), 0
    with broken[how]() as take:
        while True:  # what the run removes meanwhile is taken too
            taken = take()
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                break
            context.sleep(min(left_s, AGAIN_S))
    figures: Figures = {"target": str(folder), "how": how}
    return figures | ({"ballast_bytes": taken} if how == "full" else {"files": taken} if how == "inodes" else {})
