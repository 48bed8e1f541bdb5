"""May the run write to its disks? (probes, refused writes, now) → the trouble, or none.

    probe refused, or not back in time ─► trouble of that disk
    a writer was refused               ─► trouble, until a later probe of that disk finds the room that it needs

While there is trouble nothing is repaired: a restart would meet the same disk, and use up its budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.disk_faults import LEAST_FREE, MIB, NEED_ROOM, UNLIMITED, DiskFault, Refusal, Room, fault_of_room
from launcher.config.supervision import DiskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLook:
    """The probe of one folder. `began_at`: of the one under way, None where none is. The others are of the last that
    came back: when it began, what refused it, and the room; None before the first.

    `fault` None and `room` None after a probe: the folder can't be probed, and nothing is known. `refuses`: the file of
    a refusal, where it still may not be written.
    """

    path: str
    began_at: float | None = None
    last_began_at: float | None = None
    fault: DiskFault | None = None
    room: Room | None = None
    refuses: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTrouble:
    """A disk that the run can't write to. Times are monotonic."""

    path: str
    fault: DiskFault
    since: float  # its incident lasts from here
    first: float  # the first trouble after the last committed step: the patience of disk.patience_s counts from here
    free: int | None = None
    missing: int = 0  # bytes; 0 where room is not what it lacks, or nobody has looked

    @property
    def reason(self) -> str:
        free = "" if self.free is None else f", {_size(self.free)} free"
        missing = f", {_size(self.missing)} missing" if self.missing else ""
        return f"{self.path}: {self.fault}{free}{missing}"


def find_trouble(
    looks: Sequence[DiskLook],
    refusals: Sequence[Refusal],
    *,
    settings: DiskConfig,
    now: float,
    excused_at: float = float("-inf"),
) -> DiskTrouble | None:
    """What prevents writing now. `excused_at`: until then a probe under way had a reason to wait."""
    for look in looks:
        waits_since = None if look.began_at is None else max(look.began_at, excused_at)
        if waits_since is not None and now - waits_since > settings.stall_s:
            return _trouble(look, DiskFault.STALLED, waits_since, needed=0)
        if (fault := _fault_of(look)) is not None:
            return _trouble(look, fault, now if look.last_began_at is None else look.last_began_at, needed=0)
    by_path = {look.path: look for look in looks}
    for refusal in refusals:
        look = by_path.get(refusal.path, DiskLook(path=refusal.path))
        if not _is_cured(refusal, look):
            look = dataclasses.replace(look, path=refusal.file or look.path)
            return _trouble(look, refusal.fault, refusal.at, needed=refusal.needed)
    return None


def _fault_of(look: DiskLook) -> DiskFault | None:
    if look.fault is DiskFault.FULL and look.room is not None and look.room.inodes == 0:
        return DiskFault.NO_INODES
    if look.fault is not None:
        return look.fault
    return None if look.room is None else fault_of_room(look.room)


def _is_cured(refusal: Refusal, look: DiskLook) -> bool:
    """A probe that began later came back well, and found the room that was wanting."""
    if look.last_began_at is None or look.last_began_at <= refusal.at or look.fault is not None or look.room is None:
        return False
    if refusal.file and look.refuses == refusal.file:
        return False
    return refusal.fault not in NEED_ROOM or look.room.free >= refusal.needed


def _trouble(look: DiskLook, fault: DiskFault, since: float, *, needed: int) -> DiskTrouble:
    free = None if look.room is None else look.room.free
    missing = max(max(needed, LEAST_FREE) - free, 0) if fault in NEED_ROOM and free is not None else 0
    shown = None if free == UNLIMITED else free
    return DiskTrouble(path=look.path, fault=fault, since=since, first=since, free=shown, missing=missing)


def _size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:.1f} GiB"
