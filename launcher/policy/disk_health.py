"""May the run write to its disks? (probes, refused writes, history, now) → the trouble, or none. And when to resume.

    probe refused, or not back in time ─► trouble of that disk
    a writer was refused               ─► trouble, until a later probe of that disk finds the room that it needs
    the last trouble was a moment ago  ─► trouble stays until the back-off is over, which doubles each time

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
    """A disk that the run can't write to. `missing`: bytes, 0 where room is not what it lacks,
    or nobody has looked. `since`: monotonic.

    `first`: the same of the first of the troubles of this disk that followed each other at once; None: this one.
    """

    path: str
    fault: DiskFault
    since: float
    free: int | None = None
    missing: int = 0
    first: float | None = None

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
    patient: bool = False,
    excused_at: float = float("-inf"),
) -> DiskTrouble | None:
    """What prevents writing now. `patient`: a checkpoint is being written, and a probe may wait for it for long.
    `excused_at`: until then a probe under way had a reason to wait."""
    for look in looks:
        fault = None if patient else _stalled(look, settings, now, excused_at)
        fault = fault or _fault_of(look)
        if fault is not None:
            since = look.began_at if fault is DiskFault.STALLED else look.last_began_at
            return _trouble(look, fault, now if since is None else since, needed=0)
    by_path = {look.path: look for look in looks}
    for refusal in refusals:
        look = by_path.get(refusal.path, DiskLook(path=refusal.path))
        if not _is_cured(refusal, look):
            look = dataclasses.replace(look, path=refusal.file or look.path)
            return _trouble(look, refusal.fault, refusal.at, needed=refusal.needed)
    return None


def _stalled(look: DiskLook, settings: DiskConfig, now: float, excused_at: float) -> DiskFault | None:
    if look.began_at is None or now - max(look.began_at, excused_at) <= settings.stall_s:
        return None
    return DiskFault.STALLED


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
    is_known = fault in NEED_ROOM and free is not None
    missing = max(max(needed, LEAST_FREE) - (free or 0), 0) if is_known else 0
    shown = None if free == UNLIMITED else free
    return DiskTrouble(path=look.path, fault=fault, since=since, free=shown, missing=missing)


def resume_at(troubles: Sequence[tuple[float, float]], settings: DiskConfig) -> float:
    """When work may resume. `troubles`: each with its beginning and the first healthy observation after it, oldest
    first. One within `settings.forget_s` of the one before waits twice as long."""
    wait_s, last_end = settings.settle_s, float("-inf")
    for began, ended in troubles:
        again = began - last_end <= settings.forget_s
        wait_s = min(2 * wait_s, settings.settle_max_s) if again else settings.settle_s
        last_end = ended
    return last_end + wait_s


def _size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:.1f} GiB"
