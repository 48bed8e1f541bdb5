"""Durable writes: fsync of files and folders, atomic replacement of a file; and how much room a disk has.

A rename is atomic but not durable: until the folder that holds the name is synced, a crash may bring the old name
back, or leave the new name on an empty file. So the order is always file, its folder, rename, parent folder.
All functions raise OSError as it comes; callers explain it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from launcher.base.disk_faults import UNLIMITED, DiskFault, Refusal, Room, fault_beside


def sync_file(path: Path) -> None:
    """Flush one file's data and size to the disk. A descriptor opened for reading is enough for that on Linux."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk: what was created, renamed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, each durable in the one above."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def replace_file(path: Path, data: bytes, *, durable: bool = True, check: Callable[[], None] = lambda: None) -> None:
    """Put `data` at `path` atomically: a reader, or a crash, sees the old content or the new, never a part.

    Without `durable` a crash of the machine may lose it. `check` is called just before it takes the place of the old
    content, for a disk may have stalled until then; where it raises, the old content stays.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with staged.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        check()
        staged.rename(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def room(folder: Path) -> Room:
    """Of the filesystem of `folder`. Raises OSError. What is reserved for root counts for root.

    One that reports no size has no limit of its own (tmpfs with size=0), or doesn't know it (some FUSE ones).
    """
    stat = os.statvfs(folder)
    blocks, inodes = (stat.f_bfree, stat.f_ffree) if os.geteuid() == 0 else (stat.f_bavail, stat.f_favail)
    return Room(
        free=blocks * stat.f_frsize if stat.f_blocks else UNLIMITED,
        inodes=inodes if stat.f_files else None,
        is_read_only=bool(stat.f_flag & os.ST_RDONLY),
    )


def refusal_of(folder: Path, fault: DiskFault, *, needed: int = 0, file: str = "") -> Refusal:
    """That a write below `folder` has just met a fault, named by what its filesystem reports now."""
    with contextlib.suppress(OSError):
        fault = fault_beside(fault, room(folder), needed)
    return Refusal(path=str(folder), fault=fault, at=time.monotonic(), needed=needed, file=file)
