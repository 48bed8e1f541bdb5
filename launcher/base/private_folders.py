"""Makes private folders where every user may write (/tmp, /dev/shm), under names that another user can guess.

Who makes such a folder first owns what lies in it. So what is there already is used only where it is this user's.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """A folder of this user's that is open to nobody else; its parent must be there. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder of this user's: a file or a link is in its place")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user's: somebody else made it")
    if stat.S_IMODE(found.st_mode) & OTHERS:
        folder.chmod(0o700)


def parent_of_rays_folder() -> Path:
    """Below it Ray keeps its sockets and logs. Raises FileNotFoundError where no folder takes temporary files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def could_be_ours(folder: Path) -> bool:
    """Not there yet, or a folder in which this user alone can write. Makes nothing."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE
