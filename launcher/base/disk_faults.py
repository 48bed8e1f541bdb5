"""Which errors are a disk's: full, out of inodes, over a quota, read-only, broken, stalled. Files are not touched here.

An error is recognised by its errno, also where it is the cause of another error, or by the kernel's text for it: torch
and safetensors raise errors of their own kinds, and of another process only the log is there.
"""

from __future__ import annotations

import enum
import errno
import re
from dataclasses import dataclass

MIB = 2**20
LEAST_FREE = MIB
"""Bytes: with less a disk is full, although a short line may still find room."""

FEW_INODES = 100
"""With fewer a save of many files can fail for want of them; it has given back its own when this is looked at."""
UNLIMITED = 2**63


class DiskFault(enum.StrEnum):
    FULL = "no space left"
    NO_INODES = "no inodes left"
    QUOTA = "the quota is exceeded"
    READ_ONLY = "it is read-only"
    IO_ERROR = "input/output errors"
    STALLED = "a write does not return"
    REFUSED = "it may not be written"
    FAILED = "writing it fails"


BY_ERRNO = {
    errno.ENOSPC: DiskFault.FULL,
    errno.EDQUOT: DiskFault.QUOTA,
    errno.EROFS: DiskFault.READ_ONLY,
    errno.EIO: DiskFault.IO_ERROR,
}
REFUSALS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
OF_A_FILE = (DiskFault.REFUSED, DiskFault.FAILED)
"""Its folder may be written."""
IN_TEXT = re.compile(
    r"(No space left on device)|(Disk quota exceeded)|(Read-only file system)"
    r"|(?:\[Errno 5\]|os error 5\b|Input/output error \(os error)"
)
NEED_ROOM = frozenset({DiskFault.FULL, DiskFault.QUOTA})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A write that a disk refused. `needed`: bytes that it would have taken, 0 where nobody knows. `at`: monotonic.
    `file`: the one that is refused where its folder can be written."""

    path: str
    fault: DiskFault
    at: float
    needed: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a filesystem reports. `free` is UNLIMITED where it reports no size, `inodes` is None where it has no fixed
    number of them."""

    free: int
    inodes: int | None
    is_read_only: bool


def fault_of(error: BaseException) -> DiskFault | None:
    """The disk's fault that an error reports, itself or by its cause; None where it is another kind of error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in BY_ERRNO:
            return BY_ERRNO[found.errno]
        if (named := fault_in(str(found))) is not None:
            return named
        found = found.__cause__
    return None


def fault_of_file(error: BaseException) -> DiskFault:
    """As `fault_of`; of another kind, whether the file may not be written."""
    is_refused = isinstance(error.__cause__, OSError) and error.__cause__.errno in REFUSALS
    return fault_of(error) or (DiskFault.REFUSED if is_refused else DiskFault.FAILED)


def fault_in(text: str) -> DiskFault | None:
    """The fault that the kernel's text for it names."""
    found = IN_TEXT.search(text)
    if found is None:
        return None
    faults = (DiskFault.FULL, DiskFault.QUOTA, DiskFault.READ_ONLY)
    return next((fault for fault, group in zip(faults, found.groups(), strict=True) if group), DiskFault.IO_ERROR)


def fault_beside(fault: DiskFault, found: Room, needed: int) -> DiskFault:
    """ENOSPC is also the answer of a filesystem without inodes: where the bytes would fit, and hardly one is left."""
    has_room = found.free >= max(needed, LEAST_FREE)
    lacks_inodes = found.inodes is not None and found.inodes < FEW_INODES
    return DiskFault.NO_INODES if fault is DiskFault.FULL and has_room and lacks_inodes else fault


def fault_of_room(found: Room) -> DiskFault | None:
    """Without writing: what a filesystem's own figures show."""
    if found.is_read_only:
        return DiskFault.READ_ONLY
    if found.inodes == 0:
        return DiskFault.NO_INODES
    return DiskFault.FULL if found.free < LEAST_FREE else None
