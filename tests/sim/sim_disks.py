"""The disks of a simulated run: which of them refuses, and what a probe of each would find. All the rest is as it is:
`DiskWatch` remembers and judges, and the project's own writers meet the error.
"""

import errno
import os
from pathlib import Path

from actors.monitoring.disk_watch import DiskWatch
from launcher.base.disk_faults import UNLIMITED, DiskFault, Room
from launcher.base.messages import Cause
from launcher.policy.disk_health import DiskLook

ERRORS = {DiskFault.FULL: errno.ENOSPC, DiskFault.QUOTA: errno.EDQUOT}
"""What a writer meets. No disk stalls here: the writers' threads are real ones, and wait on no virtual clock."""
NOTICED_S = 2.0
"""A restart that was begun before the fault could be seen is no breach."""


class SimDisk:
    """Of one folder. `fault`: what it answers to each write, None where it is well."""

    def __init__(self, run, folder):
        self.run = run
        self.folder = str(folder)
        self.fault = None
        self.since = None

    def fail(self, fault):
        self.run.truth.befell(Cause.DISK_FULL)
        self.fault = fault
        self.since = self.run.loop.now

    def mend(self):
        self.fault = self.since = None
        self.run.changed.set()

    @property
    def room(self):
        return Room(free=0 if self.fault is DiskFault.FULL else UNLIMITED, inodes=None, is_read_only=False)


class SimDisks:
    """That of the run's folder, and that of the checkpoints."""

    def __init__(self, run):
        self.run = run
        self.of_the_run = SimDisk(run, run.paths.logs)
        self.of_checkpoints = SimDisk(run, run.paths.default_checkpoints)
        self._all = (self.of_the_run, self.of_checkpoints)

    def have_long_failed(self):
        """Whoever repairs anything now could have known it."""
        return any(one.since is not None and self.run.loop.now - one.since > NOTICED_S for one in self._all)

    def of(self, path):
        return next((one for one in self._all if str(path).startswith(one.folder)), None)

    def take_the_place_of_real_ones(self, patch):
        """Each sync and each appended line of the run meets the fault of its disk."""
        write = os.write

        def check(descriptor):
            disk = self.of(Path(f"/proc/self/fd/{descriptor}").readlink())
            if disk is not None and disk.fault is not None:
                raise OSError(ERRORS[disk.fault], os.strerror(ERRORS[disk.fault]))

        def checked_write(descriptor, data):
            check(descriptor)
            return write(descriptor, data)

        patch.setattr("os.fsync", check)  # and no more: nothing here loses its page cache
        patch.setattr("os.write", checked_write)
        patch.setattr("launcher.base.durable.room", lambda folder: self.of(folder).room)


class SimDiskWatch(DiskWatch):
    """Of one Coordinator."""

    def __init__(self, run):
        self.run = run
        super().__init__((), run.config.disk, changed=lambda: None)
        for folder in (run.paths.logs, run.paths.default_checkpoints):
            self._add(folder)

    def _add(self, folder: Path):
        self._probes[str(folder)] = SimProbe(self.run.disks.of(folder))


class SimProbe:
    """In place of a DiskProbe: it has just come back each time that somebody looks."""

    def __init__(self, disk):
        self.disk = disk
        self.file = ""

    def look_at_disk(self):
        is_seen = self.disk.fault is not DiskFault.QUOTA  # which has room for the few bytes of a probe
        return DiskLook(
            path=self.disk.folder,
            last_began_at=self.disk.run.loop.now,
            fault=self.disk.fault if is_seen else None,
            room=self.disk.room,
        )

    def ask(self):
        pass

    def close(self):
        pass
