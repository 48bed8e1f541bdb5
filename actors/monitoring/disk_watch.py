"""Probes the disks of a run: each from a thread of its own, so that one that never answers stops nobody.

A probe writes 4 KiB, syncs and removes them: what no figure shows (a quota, a mount that went read-only, a broken disk)
refuses that too. The threads are daemons: a disk that is stalled must not keep this process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.base.disk_faults import Refusal, fault_of
from launcher.base.durable import room
from launcher.base.private_folders import parent_of_rays_folder
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.config.supervision import DiskConfig
from launcher.policy.disk_health import DiskLook, DiskTrouble, find_trouble
from launcher.run_files.run_paths import RunPaths

PROBE = b"\0" * 4096
ASK_S = 0.2
"""A disk that works answers in milliseconds; nothing waits longer for one that does not."""
SOON_S = 0.005
PAUSE_S = 5.0
"""Between two looks: this process was stopped, or not scheduled, and so were its probes."""
SAVING_TIMES = 10
"""A probe that waits for a checkpoint's data to reach the disk has this many times `disk.stall_s`. Without an end, a
disk that stalls in a checkpoint is told to nobody until it answers."""

log = logging.getLogger("disk")


class DiskProbe:
    """Of one folder. `look` returns at once, whatever the disk does; `ask` has it probed now."""

    def __init__(self, folder: Path, *, interval_s: float, answered: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.file = ""  # of a refusal, tried too
        self._interval_s = interval_s
        self._answered = answered
        self._look = DiskLook(path=str(folder))
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._follow, name=f"disk {folder}", daemon=True)
        self._thread.start()

    def look_at_disk(self) -> DiskLook:
        return self._look

    def ask(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _follow(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            self._look = replace(self._look, began_at=began)
            found = probe(self.folder, began, self.file)
            changed = (found.fault, found.refuses) != (self._look.fault, self._look.refuses)
            self._look = found
            if changed:
                self._answered()
            self._wake.wait(self._interval_s)
            self._wake.clear()


def probe(folder: Path, began: float, refused: str = "") -> DiskLook:
    """Write to the disk of `folder`, and open the file that was `refused`; returns when it answers. Never raises."""
    found = DiskLook(path=str(folder), last_began_at=began, refuses=refused if _is_refused(refused) else "")
    file = folder / f".disk-probe-{os.getpid()}-{threading.get_ident()}"
    try:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, PROBE)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        found = replace(found, fault=fault_of(error))
        if found.fault is None:
            log.warning("disk.unknown folder=%s reason=%r", folder, error)
            return found
    try:
        return replace(found, room=room(folder))
    except OSError as error:
        log.warning("disk.unknown folder=%s reason=%r", folder, error)
        return found


def _is_refused(file: str) -> bool:
    try:
        if file:
            os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:  # whoever writes makes it
        return False
    except OSError:
        return True
    return False


class DiskWatch:
    """The trouble with the run's disks, as the plan needs it. Used on one loop; `changed` may be called on any thread.

    `folders`: what the run writes to; of those on one device the first is probed.
    """

    def __init__(self, folders: Sequence[Path], settings: DiskConfig, *, changed: Callable[[], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._probes: dict[str, DiskProbe] = {}
        self._refusals: dict[str, Refusal] = {}
        self._told: dict[str, Refusal] = {}
        self._trouble: DiskTrouble | None = None
        self._first: float | None = None  # without it, who makes too little room at each try is waited for for ever
        self._met_at = float("-inf")  # without it, a disk that fails every other second is resumed at each good one
        self._wait_s = settings.settle_s
        self._looked_at = time.monotonic()  # without it, a process that was stopped finds its own probe stalled
        self._excused_at = float("-inf")  # without it, so does one that waited for a checkpoint, the moment that ends
        devices: set[int] = set()
        for folder in folders:
            if folder.is_dir() and (device := folder.stat().st_dev) not in devices:
                devices.add(device)
                self._add(folder)

    @classmethod
    def of(cls, paths: RunPaths, settings: DiskConfig, *, changed: Callable[[], None]) -> DiskWatch:
        """Logs, checkpoints, weights and states in memory, and the folder of Ray's and the servers' temporary files."""
        temporary = parent_of_rays_folder()
        in_memory = memory_folder(paths, "weights").parent
        folders = [paths.logs, paths.default_checkpoints, temporary, in_memory]
        return cls(folders, settings, changed=changed)

    def refused(self, refusal: Refusal | None) -> None:
        """A writer met it; None: it meets nothing now. A folder that nobody probes is probed from now on.

        It counts from when it is first told here: the writer's clock may be that of another machine. Told again, it is
        the same, also after its trouble: the writer has not tried since.
        """
        if refusal is None or self._told.get(refusal.path) == refusal:
            return
        self._told[refusal.path] = refusal
        self._refusals[refusal.path] = replace(refusal, at=time.monotonic())
        if refusal.path not in self._probes:
            self._add(Path(refusal.path))
        self._probes[refusal.path].file = refusal.file
        self._probes[refusal.path].ask()

    async def probed(self, *, within_s: float = ASK_S) -> None:
        """Have all disks probed now; returns when they have answered, or after `within_s`."""
        asked_at = time.monotonic()
        for one in self._probes.values():
            one.ask()
        while not all((one.look_at_disk().last_began_at or 0.0) >= asked_at for one in self._probes.values()):
            if time.monotonic() > asked_at + within_s:
                return
            await asyncio.sleep(SOON_S)

    def trouble(self, now: float, *, stepped_at: float | None = None, patient: bool = False) -> DiskTrouble | None:
        """What keeps the run from writing, or did a moment ago. `stepped_at`: when the last step was committed.
        `patient`: a checkpoint is being written, and a probe may wait for it for SAVING_TIMES as long.

        After one, or after a pause of this process, a probe has its whole time again: it comes back later than the end
        of what it waited for. Not during trouble: a checkpoint that begins on a stalled disk would end it.
        """
        if self._trouble is None and (now - self._looked_at > PAUSE_S or (patient and self._may_wait(now))):
            self._excused_at = now
        self._looked_at = now
        found = find_trouble(
            [one.look_at_disk() for one in self._probes.values()],
            list(self._refusals.values()),
            settings=self._settings,
            now=now,
            excused_at=self._excused_at,
        )
        if found is not None:
            self._trouble = self._since_the_last_step(found, now, stepped_at)
        elif self._trouble is not None and now >= self._met_at + self._wait_s:
            self._trouble = None
            self._refusals.clear()
        return self._trouble

    def _may_wait(self, now: float) -> bool:
        waiting = [one.look_at_disk().began_at for one in self._probes.values()]
        return all(began is None or now - began <= SAVING_TIMES * self._settings.stall_s for began in waiting)

    def _since_the_last_step(self, found: DiskTrouble, now: float, stepped_at: float | None) -> DiskTrouble:
        """What no figure shows, as a quota, is met again at each try: until a step is committed all that is one
        trouble, and each try waits twice as long as the one before."""
        if self._first is None or (stepped_at is not None and stepped_at > self._met_at):
            self._first = found.since
            self._wait_s = self._settings.settle_s
        elif self._trouble is None:
            self._wait_s = min(2 * self._wait_s, self._settings.settle_max_s)
        self._met_at = now
        since = found.since if self._trouble is None else self._trouble.since
        return replace(found, since=since, first=self._first)

    def close(self) -> None:
        for one in self._probes.values():
            one.close()

    def _add(self, folder: Path) -> None:
        self._probes[str(folder)] = DiskProbe(
            folder, interval_s=self._settings.probe_interval_s, answered=self._changed
        )
