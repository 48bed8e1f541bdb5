"""Replaces or copies a folder so that a kill at any instant leaves the old one or the new one.

Copies take no time where the filesystem lets them: hard links share the file (only for files that nobody rewrites in
place), reflinks share its blocks until one of the two is written to; else the bytes are copied.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from launcher.base.durable import sync_file, sync_folder

RENAME_EXCHANGE = 2
AT_FDCWD = -100
FICLONE = 0x40049409
NOT_OFFERED = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}
)
"""What a filesystem answers that has no hard links, no reflinks, or has no such call."""


class How(enum.StrEnum):
    """How a file came into its copy, the quickest first."""

    HARD_LINK = "hard link"
    REFLINK = "reflink"
    COPY = "copy"


def copy_folder(source: Path, target: Path, *, without: Collection[str] = ()) -> How:
    """Every file of `source` in the existing folder `target`, on the disk. Returns the slowest way that was needed.

    `without`: names at the top that are left out. Raises OSError.
    """
    ways = [How.HARD_LINK]
    folders = [target]
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        if inner.parts[0] in without:
            continue
        if path.is_dir():
            (target / inner).mkdir()
            folders.append(target / inner)
        else:
            ways.append(copy_file(path, target / inner, may_link=True))
    for folder in reversed(folders):
        sync_folder(folder)
    return max(ways, key=list(How).index)


def copy_file(source: Path, target: Path, *, may_link: bool) -> How:
    """Raises OSError."""
    if may_link and _offered(lambda: os.link(source, target)):
        return How.HARD_LINK
    how = How.REFLINK if _offered(lambda: _reflink(source, target)) else How.COPY
    if how is How.COPY:
        shutil.copyfile(source, target)
    shutil.copystat(source, target)
    sync_file(target)
    return how


def _offered(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        return False
    return True


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        fcntl.ioctl(written.fileno(), FICLONE, read.fileno())


def put_in_place(staged: Path, place: Path) -> bool:
    """`staged` becomes `place`, at once; what was there lies at `staged` then (True), if anything was.

    Raises OSError; where the filesystem can't exchange two names, an existing `place` is a reason not to begin.
    """
    if not place.exists():
        staged.rename(place)
        sync_folder(place.parent)
        return False
    exchange(staged, place)
    sync_folder(place.parent)
    return True


def exchange(one: Path, other: Path) -> None:
    """Both names at once, which rename can't. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))
